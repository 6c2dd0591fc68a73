"""The program of FSDP2 equals what torch issues: as it was recorded, and as the torch installed here issues it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from random import Random

import pytest
import torch

import fsdp_sim.mini
from fsdp_sim.cost import workload
from fsdp_sim.schedule import Kind, Param, Unit, build, toy, toy_program
from fsdp_sim.spec import Model, Plan
from fsdp_sim.spec.plan import TORCH_VERSIONS
from fsdp_sim.timeline import Lane, Memory, Op, Phase
from tests.oracles.verify import verify
from tests.schedule.against_torch import torch_lines
from tests.schedule.randomly import random_plan, random_units, with_repeats
from tests.some import some

RECORDINGS = Path(__file__).parent / "recordings"
INSTALLED = ".".join(torch.__version__.split(".")[:2])
needs_known_torch = pytest.mark.skipif(
    INSTALLED not in TORCH_VERSIONS, reason=f"needs torch {', '.join(TORCH_VERSIONS)}, whose programs these are"
)


@pytest.mark.parametrize(
    ("name", "layers", "plan", "steps"),
    [
        ("default_raf_none", 3, Plan(), 2),
        ("raf_true_everywhere", 3, Plan(reshard_after_forward=True), 1),
        ("raf_false", 3, Plan(reshard_after_forward=False), 1),
        ("forward_prefetch_1", 4, Plan(forward_prefetch=1), 1),
        ("hsdp_2x4", 3, Plan(shard_size=4), 1),
        ("grad_acc_no_sync", 2, Plan(grad_accum=2, requires_gradient_sync="last"), 1),
        ("mixed_bf16_fp32reduce", 3, Plan(param_dtype="bf16", reduce_dtype="fp32"), 1),
        ("mixed_bf16", 3, Plan(param_dtype="bf16"), 1),
        ("hsdp_2x4_all_reduce_last", 3, Plan(shard_size=4, grad_accum=2, requires_all_reduce="last"), 1),
    ],
)
@pytest.mark.parametrize(("version", "folder"), [("2.13", ""), ("2.15", "torch-2.15")], ids=["2.13", "2.15"])
def test_the_program_is_line_by_line_what_torch_issued(name, layers, plan, steps, version, folder):
    text = (RECORDINGS / folder / f"{name}.txt").read_text()
    recorded = [line for line in text.splitlines() if not line.startswith("#")]
    assert toy_program(layers, 8, steps, replace(plan, torch=version)).lines() == recorded


def assert_same(units, plan, world_size, steps, **how):
    plan = replace(plan, torch=INSTALLED)
    theirs = torch_lines(units, plan, world_size, steps, every_op=True, **how)
    ours = build(units, plan, world_size, steps).lines(every_op=True)
    if how:  # the mini lets go of what it frees at one moment in its own order
        theirs, ours = frees_sorted(theirs), frees_sorted(ours)
    if theirs != ours:
        at = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), len(ours))
        before = "\n  ".join(theirs[max(0, at - 12) : at])
        one, other = ("\n  ".join(lines[at : at + 3]) for lines in (theirs, ours))
        pytest.fail(f"{plan}\nline {at} of {len(theirs)}, after\n  {before}\ntorch:\n  {one}\nours:\n  {other}", False)


def frees_sorted(lines):
    runs = groupby(lines, key=lambda line: line.startswith("free"))
    return [line for is_free, some in runs for line in (sorted(some) if is_free else some)]


SETTINGS = [  # every documented setting of FSDP2, alone
    {},
    {"reshard_after_forward": True},
    {"reshard_after_forward": False},
    {"reshard_after_forward": 1},
    {"reshard_after_forward": 2},
    {"reshard_after_forward": 8},
    {"forward_prefetch": 1},
    {"forward_prefetch": 2},
    {"backward_prefetch": 1},
    {"backward_prefetch": 2},
    {"forward_prefetch": 3, "backward_prefetch": 3},
    {"shard_size": 4},
    {"shard_size": 1},
    {"shard_size": 8},
    {"param_dtype": "bf16"},
    {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    {"param_dtype": "fp16"},
    {"param_dtype": "fp16", "reduce_dtype": "fp32"},
    {"param_dtype": "fp32"},
    {"reduce_dtype": "bf16"},
    {"reduce_dtype": "fp16"},
    {"cpu_offload": True},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": 2},
    {"grad_accum": 2},
    {"grad_accum": 3, "requires_gradient_sync": "last"},
    {"grad_accum": 2, "reshard_after_backward": "last"},
    {"grad_accum": 3, "is_last_backward": "last"},
    {"grad_accum": 3, "requires_all_reduce": "last"},
    {"requires_gradient_sync": False},
    {"reshard_after_backward": False},
    {"is_last_backward": False},
    {"reduce_scatter_max_input_buffers": 2},
    {"reduce_scatter_max_input_buffers": 3},
    {"separate_reduce_scatter_group": True},
    {"post_optim_event": True},
    {"unshard_async_op": True},
    {"gradient_divide_factor": 3.0},
    {"gradient_divide_factor": 8.0},
    {"clip_grad_norm": True},
]
PAIRS = [  # settings that act on one another
    {"shard_size": 4, "grad_accum": 2},
    {"shard_size": 4, "grad_accum": 3, "requires_all_reduce": "last"},
    {"shard_size": 4, "grad_accum": 3, "requires_all_reduce": "last", "is_last_backward": "last"},
    {"shard_size": 4, "grad_accum": 2, "requires_gradient_sync": "last", "requires_all_reduce": "last"},
    {"shard_size": 4, "requires_all_reduce": False},
    {"shard_size": 4, "param_dtype": "bf16", "reduce_dtype": "fp32"},
    {"shard_size": 4, "reduce_dtype": "bf16", "grad_accum": 2},
    {"shard_size": 4, "separate_reduce_scatter_group": True},
    {"shard_size": 4, "reshard_after_forward": 2},
    {"shard_size": 4, "cpu_offload": True, "grad_accum": 2},
    {"shard_size": 1, "gradient_divide_factor": 3.0, "reduce_dtype": "fp16"},
    {"reshard_after_forward": False, "grad_accum": 2, "reshard_after_backward": "last"},
    {"reshard_after_forward": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"},
    {"reshard_after_forward": 2, "forward_prefetch": 2, "backward_prefetch": 2},
    {"reshard_after_forward": 4, "cpu_offload": True, "param_dtype": "bf16"},
    {"param_dtype": "bf16", "reduce_dtype": "fp32", "grad_accum": 3, "requires_gradient_sync": "last"},
    {"reduce_dtype": "bf16", "grad_accum": 2, "requires_gradient_sync": "last"},
    {"param_dtype": "bf16", "cpu_offload": True},
    {"cpu_offload": True, "grad_accum": 2},
    {"reduce_scatter_max_input_buffers": 2, "grad_accum": 2, "is_last_backward": "last"},
    {"unshard_async_op": True, "forward_prefetch": 1, "backward_prefetch": 1},
    {"unshard_async_op": True, "post_optim_event": True, "reshard_after_forward": 2},
    {"activation_checkpointing": "full", "grad_accum": 2, "backward_prefetch": 2},
    {"shard_size": 4, "clip_grad_norm": True, "post_optim_event": True},
]


@needs_known_torch
@pytest.mark.parametrize("fields", [*SETTINGS, *PAIRS], ids=str)
def test_a_setting_does_what_it_does_in_torch(fields):
    assert_same(toy(3), Plan(**fields), 8, steps=2)
    if not {"shard_size", "reshard_after_forward"} & fields.keys():
        assert_same(toy(2), Plan(**fields), 1, steps=1)


@needs_known_torch
@pytest.mark.parametrize("seed", some(range(40), first=12))
def test_random_units_under_random_plans_do_what_they_do_in_torch(seed):
    chosen = Random(seed)
    world_size = chosen.choice([1, 2, 3, 4, 8])
    units, plan = random_units(chosen), random_plan(chosen, world_size)
    assert_same(units, plan, world_size, steps=chosen.choice([1, 2]))


@needs_known_torch
@pytest.mark.parametrize("seed", some(range(2000, 2015), first=5))
def test_units_that_run_several_times(seed):
    chosen = Random(seed)
    units, plan = with_repeats(chosen, random_units(chosen, 3)), random_plan(chosen, 4)
    assert_same(units, plan, 4, steps=2)
    verify(build(units, plan, 4, steps=2))


def test_a_unit_that_runs_twice_is_gathered_for_each_run_and_reduced_once():
    root, first, second = toy(2)
    program = build([root, first, second, first], Plan(), 4)
    assert program.units == (root, first, second)
    of = Counter((i.op, i.phase) for i in program.ops if i.unit == "layers.0")
    assert of[Op.ALL_GATHER, Phase.FORWARD] == of[Op.ALL_GATHER, Phase.BACKWARD] == 2
    assert of[Op.REDUCE_SCATTER, Phase.BACKWARD] == 1  # autograd hands out the sum of both runs
    assert of[Op.BWD, Phase.BACKWARD] == 2


@needs_known_torch
@pytest.mark.parametrize("seed", some(range(1000, 1012), first=4))
def test_the_mini_issues_it_too(seed):
    chosen = Random(seed)
    assert_same(random_units(chosen, 3), random_plan(chosen, 4), 4, steps=1, fsdp=fsdp_sim.mini)


@needs_known_torch
def test_where_torch_fails_there_is_no_program():
    """A slice's gather that backward did not use is pending when the next micro-batch wants the whole from shards."""
    root, first, second = Unit("root", segments=(...,)), *toy(2)[1:]
    frozen = Unit("layers.0", (Param("weight", (4, 4), requires_grad=False),))
    plan = Plan(reshard_after_forward=2, grad_accum=2, is_last_backward="last")
    with pytest.raises(RuntimeError, match="split_with_sizes"):
        torch_lines([root, frozen, second], plan, 4)
    with pytest.raises(ValueError, match=r"the gather of unit layers.0 was prefetched .* is_last_backward be True"):
        build([root, frozen, second], plan, 4)
    assert_same([root, first, second], plan, 4, steps=1)


@needs_known_torch
@pytest.mark.parametrize("wrap", ["root", 16, 17, ("layers.0", "layers.1"), ("layers.2", "head")])
def test_whatever_part_of_the_model_is_wrapped(wrap):
    assert_same(toy(3, wrap), Plan(wrap=wrap), 4, steps=1)


@needs_known_torch
@pytest.mark.parametrize("more", [
    {}, {"reshard_after_forward": True}, {"reshard_after_forward": False}, {"activation_checkpointing": "full"},
    {"forward_prefetch": 1, "backward_prefetch": 1}, {"grad_accum": 2, "reshard_after_backward": "last"},
])  # fmt: skip
def test_embedding_and_head_are_units_as_in_torchtitan(more):
    plan = Plan(wrap="embed_block_head", seq_len=4, **more)
    model = Model("tiny", n_layer=2, d_model=4, n_head=1, d_ffn=8, vocab=8, tied_embeddings=False)
    units = workload(model, plan).units
    assert [unit.name for unit in units] == ["root", "embed", "layers.0", "layers.1", "head"]
    assert_same(units, plan, 4, steps=2)


@needs_known_torch
def test_units_of_several_containers_end_backward_in_the_order_of_the_modules():
    weight = (Param("weight", (4, 4)),)
    names = ["encoder.0", "decoder.0", "encoder.1", "decoder.1"]
    units = [Unit("root", segments=(...,)), *(Unit(name, weight) for name in names)]
    assert_same(units, Plan(is_last_backward="last", grad_accum=2), 4, steps=2)


# -- bytes, groups and memory, which lines do not show


def test_collectives_carry_their_whole_message():
    layer = [i for i in toy_program(1, 8) if i.unit == "layers.0"]
    padded = 8 * 4 * 4  # 4 rows on 8 ranks: one row each, half of it padding
    assert {i.bytes for i in layer if i.communicator} == {padded}
    assert {(i.group_size, i.dtype) for i in layer if i.communicator} == {(8, "fp32")}
    assert {i.bytes for i in layer if i.category is Memory.RS_OUTPUT} == {padded // 8}
    assert {i.bytes for i in layer if i.category is Memory.UNSHARDED_GRAD} == {4 * 4 * 4}


def sizes(plan, world_size=8):
    """Of one layer of an 8 x 4 matrix: bytes by operation and by what memory is for."""
    units = [Unit("root", segments=(...,)), Unit("layer", (Param("weight", (8, 4)),))]
    program = build(units, plan, world_size)
    ops = {str(i.op): i.bytes for i in program.ops if i.bytes}
    return ops | {str(i.category): i.bytes for i in program if i.kind is Kind.ALLOC}


def test_mixed_precision_gathers_in_one_dtype_and_reduces_in_another():
    n = 8 * 4  # elements
    found = sizes(Plan(param_dtype="bf16", reduce_dtype="fp32"))
    assert (found["ALL_GATHER"], found["ag_output"], found["unsharded"], found["unsharded_grad"]) == (2 * n,) * 4
    assert found["temporary"] == found["ag_cast"] == found["ag_copy_in"] == 2 * n // 8
    assert found["REDUCE_SCATTER"] == found["rs_input"] == 4 * n
    assert found["rs_output"] == 4 * n // 8
    found = sizes(Plan(param_dtype="bf16"))
    assert (found["REDUCE_SCATTER"], found["grad_cast"], found["rs_output"]) == (2 * n, 4 * n // 8, 4 * n // 8)


def test_hybrid_sharding_reduces_over_shards_and_then_between_replicas():
    program = toy_program(1, 8, 1, Plan(shard_size=4))
    groups = {i.op: (i.group_size, i.communicator, i.bytes) for i in program.ops if i.communicator and i.unit != "root"}
    assert groups == {
        Op.ALL_GATHER: (4, "shard", 64),
        Op.REDUCE_SCATTER: (4, "shard", 64),
        Op.ALL_REDUCE: (2, "replicate", 16),
    }


def test_a_separate_reduce_scatter_group_is_another_communicator():
    program = toy_program(1, 8, 1, Plan(separate_reduce_scatter_group=True))
    assert {(i.op, i.communicator) for i in program.ops if i.communicator} == {
        (Op.ALL_GATHER, "shard"),
        (Op.REDUCE_SCATTER, "reduce_scatter"),
    }


def test_a_slice_is_kept_and_gathered_in_the_small_group():
    program = toy_program(1, 8, 1, Plan(reshard_after_forward=2))
    gathers = [(i.phase, i.group_size, i.communicator) for i in program.ops if i.op is Op.ALL_GATHER][1:]
    assert set(gathers) == {(Phase.FORWARD, 8, "shard"), (Phase.BACKWARD, 2, "post_forward")}
    assert {i.bytes for i in program if i.category is Memory.SHARDED and i.unit == "layers.0"} == {8 * 4 * 4 // 2}


def test_an_asynchronous_gather_ends_in_an_event_of_its_own():
    program = toy_program(1, 4, 1, Plan(unshard_async_op=True))
    gathers = [i for i in program.ops if i.async_op]
    recorded = {i.event for i in program if i.kind is Kind.RECORD}
    assert len({i.event for i in gathers}) == len(gathers) == 3
    assert not recorded & {i.event for i in gathers}
    for gather in gathers:
        assert any(i.kind is Kind.WAIT and i.event == gather.event for i in program)


def test_offloaded_gradients_leave_the_device_once_they_are_copied():
    program = toy_program(2, 4, 1, Plan(cpu_offload=True))
    alive, most = Counter(), 0
    for i in program:
        if i.category is Memory.RS_OUTPUT:
            alive["bytes"] += i.bytes if i.kind is Kind.ALLOC else -i.bytes
            most = max(most, alive["bytes"])
    assert most == 2 * 4 * 4  # the root's two gradients, a row each; the layers' have gone
    assert not +alive


@pytest.mark.parametrize("accumulates", [1, 2])
def test_what_is_offloaded_is_summed_clipped_and_stepped_by_the_cpu(accumulates):
    program = toy_program(2, 4, 2, Plan(cpu_offload=True, clip_grad_norm=True, grad_accum=accumulates))
    computed = [number for number, i in enumerate(program) if i.kind is Kind.OP and i.lane is Lane.CPU]
    on_cpu = {program.instructions[number].op for number in computed} - {Op.ALL_REDUCE}
    assert on_cpu == {Op.NORM, Op.CLIP, Op.OPTIM} | ({Op.ACCUMULATE} if accumulates > 1 else set())
    assert not any(i.op in on_cpu and i.lane is not Lane.CPU for i in program)
    for number in computed:  # and the CPU goes on when that is done
        i, after = program.instructions[number : number + 2]
        assert i.op is Op.ALL_REDUCE or (after.kind, after.lane) == (Kind.CPU_SYNC, Lane.CPU)


def test_accumulated_sharded_gradients_keep_one_output_alive():
    program = toy_program(1, 4, 1, Plan(grad_accum=3))
    alive, most = Counter(), Counter()
    for i in program:
        if i.category is Memory.RS_OUTPUT:
            alive[i.unit] += 1 if i.kind is Kind.ALLOC else -1
            most[i.unit] = max(most[i.unit], alive[i.unit])
    assert most == {"root": 2, "layers.0": 2}
    assert not +alive


@pytest.mark.parametrize("version", ["2.13", "2.15"])
def test_whole_gradients_kept_without_sync_are_kept_once_in_the_reduce_dtype(version):
    plan = Plan(grad_accum=3, requires_gradient_sync="last", param_dtype="bf16", reduce_dtype="fp32", torch=version)
    alive = Counter()
    for i in toy_program(1, 4, 1, plan):
        if i.category is Memory.UNSHARDED_GRAD and i.unit == "layers.0":
            alive[i.dtype] += i.bytes if i.kind is Kind.ALLOC else -i.bytes
        if i.phase is Phase.FORWARD and i.micro_batch > 0:
            assert +alive == {"fp32": 4 * 4 * 4}
    assert not +alive


def test_tied_parameters_are_gathered_once_and_their_gradient_is_one():
    tied = Param("embed.weight", (8, 4), used_by=("embed", "head"))
    units = [Unit("root", (tied,), ("embed", ..., "head")), Unit("layer", (Param("weight", (4, 4)),))]
    program = build(units, Plan(), 4)
    verify(program)
    of_root = [i for i in program if i.unit == "root"]
    assert {i.bytes for i in of_root if i.category in (Memory.AG_OUTPUT, Memory.UNSHARDED_GRAD)} == {8 * 4 * 4}
    assert sum(i.category is Memory.UNSHARDED_GRAD and i.kind is Kind.ALLOC for i in of_root) == 1


def test_recomputation_comes_before_the_backward_it_serves():
    units = [Unit("root", segments=(...,)), Unit("block", (Param("w", (4, 4)),), ("attn", "mlp"))]
    program = build(units, Plan(activation_checkpointing="full"), 4)
    assert [i.what for i in program.ops if i.op in (Op.FWD, Op.RECOMPUTE, Op.BWD)] == [
        "FWD attn", "FWD mlp", "RECOMPUTE attn", "RECOMPUTE mlp", "BWD mlp", "BWD attn",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "world_size", "message"),
    [
        (Plan(reshard_after_forward=3), 8, "reshard_after_forward is 3, which does not divide the 8 .* 1, 2, 4, 8"),
        (Plan(shard_size=3), 8, "shard_size is 3, which does not divide the world size 8; .* one of 1, 2, 4, 8"),
    ],
)
def test_ranks_that_do_not_divide_are_refused(plan, world_size, message):
    with pytest.raises(ValueError, match=message):
        build(toy(2), plan, world_size)


def test_in_backward_a_slice_for_two_ranks_is_copied_in_which_is_twice_a_shard_of_four():
    program = build(toy(2), Plan(reshard_after_forward=2, param_dtype="bf16"), 4)
    copied = [i for i in program.ops if i.op is Op.AG_COPY_IN and i.unit == "layers.0"]
    assert [i.bytes for i in copied if i.phase is Phase.FORWARD] == [2 * 16 // 4]
    assert {i.bytes for i in copied if i.phase is Phase.BACKWARD} == {2 * 16 // 2}
