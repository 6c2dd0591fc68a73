"""FSDP1's programs: line by line those of torch's ``FullyShardedDataParallel``; memory, bytes, and what is checked."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.schedule import Kind, Param, Program, Unit, build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory, Op
from tests.oracles.flat_symbols import verify_flat
from tests.oracles.verify import ProgramError, verify
from tests.schedule.flat_random import mixes, random_fsdp1, random_units
from tests.schedule.fsdp1_torch import recorded
from tests.some import some

RECORDINGS = Path(__file__).parent / "recordings"
torch_2_13 = pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="needs torch 2.13, whose programs these are"
)
LAST = {"grad_accum": 2, "requires_gradient_sync": "last"}
HYBRID = {"sharding_strategy": "HYBRID_SHARD", "shard_size": 4}
FREES_A_SHARD = (Kind.FREE, Memory.RS_OUTPUT)
DOCUMENTED = {
    "full shard": {},
    "no limit": {"limit_all_gathers": False},
    "forward prefetch": {"forward_prefetch": True},
    "forward prefetch, no limit": {"forward_prefetch": True, "limit_all_gathers": False},
    "backward post": {"backward_prefetch": "BACKWARD_POST"},
    "no backward prefetch": {"backward_prefetch": "none"},
    "shard grad op": {"sharding_strategy": "SHARD_GRAD_OP"},
    "shard grad op, backward post": {"sharding_strategy": "SHARD_GRAD_OP", "backward_prefetch": "BACKWARD_POST"},
    "no shard": {"sharding_strategy": "NO_SHARD"},
    "no shard, bf16": {"sharding_strategy": "NO_SHARD", "param_dtype": "bf16"},
    "hybrid": HYBRID,
    "hybrid, one replica": {"sharding_strategy": "HYBRID_SHARD"},
    "hybrid zero2, forward prefetch": {
        "sharding_strategy": "_HYBRID_SHARD_ZERO2",
        "shard_size": 2,
        "forward_prefetch": True,
    },
    "bf16": {"param_dtype": "bf16"},
    "bf16, reduced in fp32": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    "reduced in bf16": {"reduce_dtype": "bf16"},
    "hybrid, bf16": {**HYBRID, "param_dtype": "bf16"},
    "every micro-batch reduced": {"grad_accum": 3},
    "no_sync": LAST,
    "no_sync, shard grad op": {"sharding_strategy": "SHARD_GRAD_OP", **LAST},
    "no_sync, no shard, bf16": {"sharding_strategy": "NO_SHARD", "param_dtype": "bf16", **LAST},
    "no_sync, backward post": {"backward_prefetch": "BACKWARD_POST", **LAST},
    "checkpointing": {"activation_checkpointing": "full"},
    "checkpointing of every second, forward prefetch": {"activation_checkpointing": 2, "forward_prefetch": True},
    "offload": {"cpu_offload": True},
    "offload, bf16, no_sync": {"cpu_offload": True, "param_dtype": "bf16", **LAST},
}


def fsdp1(**settings_: object) -> Plan:
    return Plan(api="fsdp1", **settings_)


def program(units: list[Unit], world_size: int = 8, steps: int = 1, **settings_: object) -> Program:
    return build(units, fsdp1(**settings_), world_size, steps)


@pytest.mark.parametrize(
    ("name", "steps", "settings_"),
    [
        ("fsdp1_full_shard_default", 2, {}),
        ("fsdp1_full_shard_no_limit", 1, {"limit_all_gathers": False}),
        ("fsdp1_shard_grad_op", 1, {"sharding_strategy": "SHARD_GRAD_OP"}),
    ],
)
def test_the_recordings_of_torch(name, steps, settings_):
    lines = (RECORDINGS / f"{name}.txt").read_text().splitlines()
    assert program(toy(4), 8, steps, **settings_).lines() == [line for line in lines if not line.startswith("#")]


@torch_2_13
@pytest.mark.parametrize(  # 3 ranks are no power of two
    ("name", "world_size"), [*((n, 8) for n in DOCUMENTED), ("full shard", 3), ("no shard, bf16", 3), ("offload", 3)]
)
def test_torch_issues_the_same(name, world_size):
    plan = fsdp1(**DOCUMENTED[name])
    assert build(toy(3), plan, world_size, 2).lines() == recorded(toy(3), plan, world_size, 2)


@torch_2_13
@pytest.mark.parametrize("settings_", [{}, {"sharding_strategy": "HYBRID_SHARD"}, {"param_dtype": "bf16"}])
def test_one_rank_does_not_shard(settings_):
    plan = fsdp1(**settings_)
    issued = build(toy(2), plan, 1, 2)
    assert issued.lines() == recorded(toy(2), plan, 1, 2)
    assert {i.op for i in issued if i.communicator} == {Op.ALL_REDUCE}


@torch_2_13
@pytest.mark.parametrize("seed", some(range(30), first=12))
def test_torch_issues_the_same_for_any_units_and_settings(seed):
    """Units within units, frozen and tied parameters, several segments, every setting."""
    r = Random(seed)
    units = random_units(r)
    plan, world_size = random_fsdp1(r, units)
    steps, every_op = r.choice((1, 2, 3)), not mixes(units)
    theirs = recorded(units, plan, world_size, steps, every_op=every_op)
    ours = build(units, plan, world_size, steps).lines(every_op=every_op)
    assert ours == theirs


@torch_2_13
@pytest.mark.parametrize("settings_", [{}, {"forward_prefetch": True}, {"sharding_strategy": "SHARD_GRAD_OP", **LAST}])
def test_a_model_of_one_unit(settings_):
    units = [Unit("root", (Param("a.w", (4, 4)), Param("b.w", (4, 4))), segments=("a", "b"))]
    assert build(units, fsdp1(**settings_), 4, 2).lines() == recorded(units, fsdp1(**settings_), 4, 2)


@torch_2_13
@pytest.mark.parametrize("beside", [False, True])
def test_a_unit_below_all_that_trains_stays_whole_unless_torch_needs_use_orig_params(beside):
    """Kept after forward, and no backward reaches it. Frozen beside trained in any unit needs ``use_orig_params``."""
    frozen, trained = Param("frozen", (4, 4), requires_grad=False), Param("trained", (4, 4))
    units = [Unit("root", segments=(...,)), Unit("below", (frozen,)), Unit("top", (frozen, trained)[not beside :])]
    ours = program(units, 2, 2, sharding_strategy="SHARD_GRAD_OP")
    assert ours.lines(every_op=False) == recorded(units, ours.plan, 2, 2, every_op=False)
    gathers = sum((i.op, i.unit) == (Op.ALL_GATHER, "below") for i in ours.ops)
    assert gathers == (2 if beside else 1)


def test_a_forward_prefetch_delays_the_post_backward_of_its_unit():
    """From the second iteration on: see the note in `fsdp1`."""
    order = [
        line[28:]
        for line in program(toy(2), steps=2, forward_prefetch=True).lines()
        if "BWD" in line or "post_backward(" in line
    ]
    first, second = order[:7], order[7:]
    assert first.index("post_backward(layers.1)") < first.index("BWD layers.0")
    assert second.index("post_backward(layers.1)") > second.index("BWD layers.0")


def live(what: Program, *categories: Memory) -> list[int]:
    """Bytes alive after each alloc and free."""
    found, total = [], 0
    for i in what:
        if i.category in categories and i.kind in (Kind.ALLOC, Kind.FREE):
            total += i.bytes if i.kind is Kind.ALLOC else -i.bytes
            found.append(total)
    return found


UNEVEN = [
    Unit("root", (Param("embed", (5, 3)), Param("head", (3, 5))), segments=("embed", ..., "head")),
    *(Unit(f"layers.{n}", (Param("w", (7, 3)), Param("b", (7,)))) for n in range(3)),
]  # 30 and 28 elements


def test_a_flat_parameter_is_padded_to_equal_shards():
    sizes = {i.unit: i.bytes for i in program(UNEVEN).ops if i.op is Op.ALL_GATHER}
    assert sizes == {"root": 32 * 4, "layers.0": 32 * 4, "layers.1": 32 * 4, "layers.2": 32 * 4}
    reduced = {(i.unit, i.bytes) for i in program(UNEVEN, 3, param_dtype="bf16", reduce_dtype="fp32").ops
               if i.op is Op.REDUCE_SCATTER}  # fmt: skip
    assert reduced == {("root", 30 * 4), *((f"layers.{n}", 30 * 4) for n in range(3))}


def test_two_units_and_the_root_are_whole_at_most():
    assert max(live(program(UNEVEN), Memory.UNSHARDED)) == 3 * 32 * 4
    kept = live(program(UNEVEN, sharding_strategy="SHARD_GRAD_OP"), Memory.UNSHARDED)
    assert max(kept) == 4 * 32 * 4
    assert kept[-1] == 0


def test_without_shards_parameters_need_no_memory_but_for_their_casts():
    assert live(program(UNEVEN, sharding_strategy="NO_SHARD"), Memory.UNSHARDED) == []
    assert max(live(program(UNEVEN, sharding_strategy="NO_SHARD", param_dtype="bf16"), Memory.UNSHARDED)) > 0


def test_gradients_are_whole_until_reduced_and_then_shards():
    one = program(UNEVEN)
    assert max(live(one, Memory.RS_OUTPUT)) == 4 * 4 * 4  # 4 units of 4 elements on each of 8 ranks
    assert (
        live(one, Memory.RS_OUTPUT)[-1] == live(one, Memory.UNSHARDED_GRAD)[-1] == live(one, Memory.RS_INPUT)[-1] == 0
    )
    kept = program(UNEVEN, grad_accum=2, requires_gradient_sync="last")
    backward = [i for i in kept if i.micro_batch == 0]
    left = sum(i.bytes * (1 if i.kind is Kind.ALLOC else -1) for i in backward if i.category is Memory.UNSHARDED_GRAD)
    assert left == (30 + 3 * 28) * 4


def test_what_is_freed_early_waits_for_the_stream_that_used_it():
    instructions = program(UNEVEN, param_dtype="bf16", reduce_dtype="fp32").instructions
    seen = Counter()
    for before, i in pairwise(instructions):
        if before.kind is Kind.FREE and i.kind is Kind.RECORD_STREAM:
            assert (before.category, before.unit) == (i.category, i.unit)
            seen[before.category, before.lane, i.lane] += 1
    assert seen == {
        (Memory.UNSHARDED, Lane.UNSHARD, Lane.COMPUTE): 3 + 4,  # after forward, not the root; after backward
        (Memory.TEMPORARY, Lane.PRE_UNSHARD, Lane.UNSHARD): 4 + 3,  # casts, again in backward, not the root
        (Memory.UNSHARDED_GRAD, Lane.COMPUTE, Lane.POST_BACKWARD): 4,
    }


@pytest.mark.parametrize(
    ("settings_", "adds_on", "told"),
    [({}, Lane.POST_BACKWARD, set()), (HYBRID, Lane.ALL_REDUCE, {Lane.ALL_REDUCE})],
)
def test_shards_of_gradients_are_added_up_where_they_were_reduced_last(settings_, adds_on, told):
    """What was added is freed at once: the allocator is told of a stream that is not the one it was made on."""
    what = program(UNEVEN, 8, grad_accum=3, **settings_)
    assert {i.lane for i in what.ops if i.op is Op.ACCUMULATE} == {adds_on}
    frees = [(before, i) for before, i in pairwise(what) if (before.kind, before.category) == FREES_A_SHARD]
    assert {i.lane for before, i in frees if before.micro_batch and i.kind is Kind.RECORD_STREAM} == told


def test_hybrid_reduces_shards_between_replicas():
    ops = program(UNEVEN, 8, **HYBRID).ops
    groups = {(i.op, i.communicator, i.group_size, i.lane) for i in ops if i.communicator}
    assert groups == {
        (Op.ALL_GATHER, "shard", 4, Lane.UNSHARD),
        (Op.REDUCE_SCATTER, "shard", 4, Lane.POST_BACKWARD),
        (Op.ALL_REDUCE, "replicate", 2, Lane.ALL_REDUCE),
    }
    assert {i.bytes for i in ops if i.op is Op.ALL_REDUCE and i.unit == "layers.0"} == {28 * 4 // 4}


def test_offloaded_shards_are_brought_and_gradients_taken_back():
    what = program(UNEVEN, cpu_offload=True)
    copies = Counter(i.op for i in what.ops if i.op in (Op.H2D, Op.D2H))
    assert copies == {Op.H2D: 4 + 4, Op.D2H: 4}  # also the root's in backward, which is whole: torch copies it
    last_sync = max(k for k, i in enumerate(what) if i.kind is Kind.CPU_SYNC and i.lane is not Lane.CPU)
    optimizer = next(k for k, i in enumerate(what) if i.op is Op.OPTIM)
    assert last_sync < optimizer
    assert not live(what, Memory.RS_OUTPUT)[-1]


@given(r=st.randoms(use_true_random=False), steps=st.integers(1, 3))
def test_every_program_is_right(r, steps):
    units = random_units(r)
    plan, world_size = random_fsdp1(r, units)
    what = build(units, plan, world_size, steps)
    verify_flat(what)
    verify(what)
    trained = [u.name for u in units if any(p.requires_grad for p in u.params)]
    syncs = steps * (plan.grad_accum if plan.requires_gradient_sync is True else 1)
    reduce = (
        Op.ALL_REDUCE
        if plan.sharding_strategy == "NO_SHARD" or (plan.shard_size or world_size) == 1
        else Op.REDUCE_SCATTER
    )
    assert Counter(i.unit for i in what.ops if i.op is reduce) == dict.fromkeys(trained, syncs)


@pytest.mark.parametrize(
    ("api", "kind", "op", "lane", "message"),
    [
        ("fsdp1", Kind.OP, Op.ALL_GATHER, Lane.UNSHARD, "not gathered"),
        ("fsdp1", Kind.OP, Op.REDUCE_SCATTER, Lane.POST_BACKWARD, "is reduced"),
        ("fsdp1", Kind.OP, Op.DIV, Lane.POST_BACKWARD, "divided by"),
        ("fsdp1", Kind.OP, Op.BWD, Lane.COMPUTE, "out of order"),
        ("fsdp1", Kind.WAIT_STREAM, Op.OTHER, Lane.POST_BACKWARD, "does not wait for BWD"),
        ("fsdp1", Kind.ALLOC, Op.ALLOC, Lane.UNSHARD, "not gathered"),
        ("fsdp1", Kind.FREE, Op.FREE, Lane.UNSHARD, "never freed"),
        ("ddp", Kind.OP, Op.ALL_REDUCE, None, "is reduced"),
        ("ddp", Kind.OP, Op.RS_COPY_IN, None, "were copied"),
        ("ddp", Kind.WAIT_STREAM, Op.OTHER, None, "does not wait for"),
        ("ddp", Kind.RECORD, Op.OTHER, None, "nothing has recorded"),
        ("zero2", Kind.OP, Op.ALL_GATHER, None, "not gathered"),
        ("zero2", Kind.OP, Op.OPTIM, None, "optimizer"),
    ],
)
def test_a_program_that_lacks_one_instruction_is_wrong(api, kind, op, lane, message):
    what = build(UNEVEN, Plan(api=api), 8, steps=2)
    wrong = next(i for i in what if (i.kind, i.op) == (kind, op) and lane in (None, i.lane))
    with pytest.raises(ProgramError, match=message):
        verify_flat(replace(what, instructions=tuple(i for i in what if i is not wrong)))


def test_one_reduction_too_many_is_wrong():
    what = program(UNEVEN)
    twice = tuple(j for i in what for j in ((i, i) if i.op is Op.REDUCE_SCATTER else (i,)))
    with pytest.raises(ProgramError, match="twice"):
        verify_flat(replace(what, instructions=twice))


@pytest.mark.parametrize(
    ("units", "settings_", "message"),
    [
        (
            [*toy(1)[:1], Unit("layers.0", (Param("a", (4,)), Param("b", (4,), "bf16")))],
            {},
            "layers.0 .* bf16, fp32.*'bf16'",
        ),
        (toy(1), {"requires_gradient_sync": False}, "'last'"),
        (toy(1), {"sharding_strategy": "HYBRID_SHARD", "shard_size": 1}, "NO_SHARD"),
    ],
)
def test_what_cannot_be_is_refused(units, settings_, message):
    with pytest.raises(ValueError, match=message):
        program(units, 8, **settings_)
