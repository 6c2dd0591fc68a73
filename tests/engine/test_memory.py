"""Live bytes of programs: FSDP's buffers as torch's recordings show them, activations, the allocator's pools."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cost import Output, Work, Workload
from fsdp_sim.engine import memory, run
from fsdp_sim.engine.tensors import tensors
from fsdp_sim.schedule import Kind, build, toy
from fsdp_sim.simulation import simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Lane, Memory, Op, Phase
from tests.engine.programs import by_hand, devices, durations, layers_only, plans, steps_of_training

UNIT = 8 * 4 * 4  # bytes of one layer of layers_only
TRANSIENT = set(Memory) - {Memory.SHARDED, Memory.OPTIMIZER, Memory.RS_OUTPUT}


def peaks(n, plan, world_size=8):
    """The most unsharded layers alive in forward and in backward, gradients that are already sharded not counted."""
    profile = memory(build(layers_only(n), plan, world_size))
    return tuple(profile.peak_of(TRANSIENT, phase) / UNIT for phase in (Phase.FORWARD, Phase.BACKWARD))


# -- FSDP's buffers


def test_default_peaks_at_3_layers_in_forward_and_4_in_backward():
    assert peaks(6, Plan()) == (3, 4)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_explicit_prefetch_of_depth_k_peaks_at_k_plus_2_and_k_plus_3(depth):
    assert peaks(8, Plan(forward_prefetch=depth, backward_prefetch=depth)) == (depth + 2, depth + 3)


def test_without_resharding_all_layers_are_kept():
    for n in (3, 6):
        assert peaks(n, Plan(reshard_after_forward=False)) == (n + 2, n + 1)  # in backward gradients and an input


def test_asynchronous_unsharding_peaks_at_2_in_forward():
    assert peaks(6, Plan(unshard_async_op=True))[0] == 2


def test_two_reduce_scatter_inputs_peak_at_5_in_backward():
    assert peaks(6, Plan(reduce_scatter_max_input_buffers=2))[1] == 5


def test_sharded_gradients_add_up_through_backward():
    profile = memory(build(layers_only(4), Plan(), 8))
    outputs = profile.by_category[Memory.RS_OUTPUT]
    assert max(outputs) == 4 * UNIT / 8
    assert outputs[-1] == 0  # zero_grad


def test_the_states_are_there_from_the_beginning():
    program = build(layers_only(4), Plan(), 8)
    profile = memory(program)
    states = program.state_bytes
    assert profile.by_category[Memory.OPTIMIZER] == [2 * 4 * UNIT / 8] * len(profile.at)
    assert profile.bytes[-1] == sum(states.values()) == 3 * 4 * UNIT / 8


def test_the_optimizer_may_need_one_more_number_for_each_parameter():
    program = build(layers_only(1), Plan(), 8)
    for foreach, more in ((False, 0), (True, UNIT / 8)):
        profile = memory(program, foreach_optimizer=foreach)
        assert profile.peak_of({Memory.TEMPORARY}, Phase.OPTIMIZER) == more
        assert profile.bytes[-1] == 3 * UNIT / 8


# -- activations

BLOCK = Work(
    saved_bytes=100, input_bytes=10, output_bytes=10, forward_temporary_bytes=7, backward_temporary_bytes=30,
    outputs=(Output("mm", 40, 15), Output("mm", 7, 7)), is_block=True,
)  # fmt: skip
EMBED = Work(saved_bytes=12, input_bytes=2, output_bytes=10, backward_temporary_bytes=10)
HEAD = Work(
    saved_bytes=55, input_bytes=10, output_bytes=1, logits_bytes=50, forward_temporary_bytes=5,
    backward_temporary_bytes=60,
)  # fmt: skip


def toy_workload(layers):
    units = toy(layers)
    work = {"embed": EMBED, "head": HEAD} | {f"layers.{i}": BLOCK for i in range(layers)}
    return Workload("toy", tuple(units), work)


def activations(plan, layers=3):
    """After each operation of compute: what is kept, and in flight, by category."""
    workload = toy_workload(layers)
    program = build(workload.units, plan, 8)
    profile = memory(program, workload)
    kept = {Memory.ACTIVATION, Memory.CHECKPOINT, Memory.LOGITS, Memory.TEMPORARY}
    wanted = {Op.FWD, Op.BWD, Op.RECOMPUTE}
    after = {}
    for index, number in enumerate(profile.at):
        i = program.instructions[number]
        if i.op in wanted:
            after[i.op, i.unit] = {
                category: int(live[index]) for category, live in profile.by_category.items() if category in kept
            }
    return {key: {c.value: b for c, b in found.items() if b} for key, found in after.items()}, profile


def test_forward_keeps_what_backward_needs_and_backward_releases_it():
    after, _ = activations(Plan())
    assert after[Op.FWD, "embed"] == {"activation": 12}
    assert after[Op.FWD, "layers.2"] == {"activation": 312}
    assert after[Op.FWD, "head"] == {"activation": 317, "logits": 50}
    assert after[Op.BWD, "head"] == {"activation": 312}  # the gradient of its input takes the place of the input
    assert after[Op.BWD, "layers.1"] == {"activation": 112}
    assert after[Op.BWD, "embed"] == {}


def test_full_checkpointing_keeps_the_outputs_and_computes_one_block_again():
    after, _ = activations(Plan(activation_checkpointing="full"))
    assert after[Op.FWD, "layers.2"] == {"activation": 12, "checkpoint": 30}
    assert after[Op.RECOMPUTE, "layers.2"] == {"activation": 102, "checkpoint": 30}
    assert after[Op.BWD, "layers.2"] == {"activation": 12, "checkpoint": 20}


def test_selective_checkpointing_keeps_some_of_it():
    after, _ = activations(Plan(activation_checkpointing="selective"))
    assert after[Op.FWD, "layers.2"] == {"activation": 12, "checkpoint": 3 * (10 + 40)}
    # What was kept and is not needed any more is gone
    assert after[Op.RECOMPUTE, "layers.2"] == {"activation": 12 + 75, "checkpoint": 125}
    assert after[Op.BWD, "layers.2"] == {"activation": 12, "checkpoint": 100}


def test_every_second_block():
    after, _ = activations(Plan(activation_checkpointing=2))
    recomputed = {segment for op, segment in after if op is Op.RECOMPUTE}
    kept = sum(10 if f"layers.{i}" in recomputed else 100 for i in range(3))
    assert 0 < len(recomputed) < 3
    assert sum(after[Op.FWD, "layers.2"].values()) == 12 + kept


def test_temporaries_count_at_their_moment():
    _, profile = activations(Plan(), layers=2)
    live = profile.by_category
    # the head's backward: its logits and their gradients
    assert max(live[Memory.LOGITS]) == 50 + 60
    assert max(live[Memory.TEMPORARY]) == 30
    most = int(np.argmax(live[Memory.LOGITS]))
    assert profile.program.instructions[profile.at[most]].what == "BWD head"


def test_buffers_of_fsdp_are_the_same_with_and_without_activations():
    workload = toy_workload(3)
    program = build(workload.units, Plan(), 8)
    alone, beside = memory(program).by_category, memory(program, workload).by_category
    for category in set(alone) - {Memory.TEMPORARY}:
        assert max(beside[category]) == max(alone[category]), category


def test_what_an_operation_frees_is_there_until_it_ends():
    workload = toy_workload(2)
    played = run(build(workload.units, Plan(), 8), lambda i: 4.0)
    profile = memory(played, workload)
    (head,) = (e for e in played.timeline().ops if (e.op, e.unit) == (Op.BWD, "head"))
    of_head = profile.program.instructions.index(next(i for i in profile.program.ops if i.what == "BWD head"))
    times = {
        change > 0: at
        for number, change, at in zip(profile.at, profile.changes, profile.times_s, strict=True)
        if number == of_head
    }
    assert times == {True: head.start_s, False: head.end_s}
    assert head.end_s == head.start_s + 4


def test_with_one_micro_batch_after_the_other_nothing_is_left_behind():
    once, _ = activations(Plan())
    twice, profile = activations(Plan(grad_accum=3))
    assert once == twice
    kept = {Memory.ACTIVATION, Memory.CHECKPOINT, Memory.LOGITS, Memory.TEMPORARY}
    assert all(live[-1] == 0 for category, live in profile.by_category.items() if category in kept)


def test_a_segment_without_work_is_named():
    with pytest.raises(ValueError, match=r"says nothing of segment 'layers\.2'.*knows embed, head, layers\.0"):
        memory(build(toy(3), Plan(), 8), toy_workload(2))


# -- the peak


def test_the_peak_is_explained_by_its_parts():
    workload = toy_workload(3)
    profile = memory(build(workload.units, Plan(), 8), workload)
    assert sum(part.bytes for part in profile.peak) == profile.peak_bytes == sum(profile.peak_by_category.values())
    assert [part.bytes for part in profile.peak] == sorted((part.bytes for part in profile.peak), reverse=True)
    most = int(np.argmax(profile.by_category[Memory.LOGITS]))
    logits = [part for part in profile.alive(most) if part.bytes == 110]
    assert logits == [(Memory.LOGITS, "root", 110)]
    at_head = {part.unit: part.bytes for part in profile.alive(most) if part.category is Memory.ACTIVATION}
    assert at_head == {"layers.0": 100, "layers.1": 100, "layers.2": 100, "root": 12 + 5}


def test_times_need_a_run_and_follow_cpu_and_streams():
    program = build(layers_only(2), Plan(), 8)
    with pytest.raises(ValueError, match="made of a program, which has no times"):
        _ = memory(program).times_s
    profile = memory(run(program, durations(), issue_s=1.0))
    assert (np.diff(profile.cpu_s) >= 0).all()
    assert np.greater_equal(profile.times_s, profile.cpu_s).all()
    assert profile.peak_s == profile.times_s[profile.peak_index]


@given(steps_of_training(), devices, st.integers(0, 2))
def test_profile_and_timeline_tell_the_same(case, device, issue_s):
    program, seconds, _ = case
    played = run(program, {key: float(s[0]) for key, s in seconds.items()}, device=device, issue_s=issue_s)
    profile, timeline = memory(played), played.timeline()
    events = [e for e in timeline if e.is_memory]
    signed = [e.bytes if e.op is Op.ALLOC else -e.bytes for e in events]
    assert profile.changes == signed
    assert profile.cpu_s == [e.issue_s for e in events]
    assert profile.times_s == [e.start_s for e in events]
    assert profile.reserved_bytes >= profile.active_bytes >= 0
    assert profile.active_bytes >= profile.peak_bytes


@given(plans)
def test_a_program_s_timeline_has_the_events_of_a_run_without_their_times(plan):
    program = build(toy(2), plan, 4)
    of_run = memory(run(program, lambda i: 1.0)).timeline(program.header)
    fields = ("op", "unit", "step", "micro_batch", "phase", "bytes", "group_size", "category")
    assert list(program.timeline.columns.rows(*fields)) == list(of_run.columns.rows(*fields))
    assert program.timeline.span_s == 0


@given(plans, st.integers(1, 3))
def test_after_every_step_the_states_are_all_that_is_left(plan, layers):
    program = build(toy(layers), plan, 4)
    profile = memory(program)
    assert min(profile.bytes) >= 0
    kept = program.state_bytes
    if plan.api == "fsdp2" and plan.reshard_after_forward is not False:
        assert profile.bytes[-1] == sum(kept.values())


# -- the allocator


def alloc(lane, n_bytes, unit, kind=Kind.ALLOC):
    op = Op.ALLOC if kind is Kind.ALLOC else Op.FREE
    return {"kind": kind, "op": op, "lane": lane, "unit": unit, "bytes": n_bytes, "category": Memory.UNSHARDED}


def free(lane, n_bytes, unit):
    return alloc(lane, n_bytes, unit, Kind.FREE)


@pytest.mark.parametrize("grad_accum", [{}, {"grad_accum": 3, "requires_gradient_sync": "last"}], ids=str)
@pytest.mark.parametrize("model", ["gpt2-124m", toy_workload(3)], ids=["with tapes", "without"])
def test_what_a_step_allocates_it_frees_tensor_by_tensor(model, grad_accum):
    plan = Plan(param_dtype="bf16", reduce_dtype="fp32", **grad_accum)
    sim = simulate(model, Cluster("A100", gpus=8), plan)
    alive = {}
    for move in chain(*(piece for pieces in tensors(sim.program, sim.workload.work, None)[2:4] for piece in pieces)):
        if move.bytes:
            assert move.tensor not in alive
            alive[move.tensor] = move.bytes
        else:
            del alive[move.tensor]
    assert alive == {}


def test_whole_gradients_that_are_kept_in_fp32_are_active():
    plan = Plan(seq_len=512, param_dtype="bf16", reduce_dtype="fp32", grad_accum=3, requires_gradient_sync="last")
    sim = simulate("gpt2-124m", Cluster("A100", gpus=8), plan)
    assert sim.peak_memory_bytes <= sim.memory.active_bytes < 1.1 * sim.peak_memory_bytes


@pytest.mark.parametrize("kept", [None, "full"])
def test_logits_that_are_never_whole_are_not_active_either(kept):
    plan = Plan(micro_batch=32, param_dtype="bf16", loss_chunks=8, activation_checkpointing=kept)
    sim = simulate("gpt2-124m", Cluster("A100", gpus=8), plan)
    assert sim.peak_memory_bytes <= sim.memory.active_bytes < 1.1 * sim.peak_memory_bytes


def test_a_parameter_s_shard_is_one_tensor_and_its_states_are_two():
    program = build(toy(2), Plan(), 8)
    found = tensors(program, None, None)
    shards = [p.padded_bytes(8) // 8 for unit in program.units for p in unit.params]
    assert found.parameters == shards
    assert sorted(found.states) == sorted(2 * shards)


MIB = 2**20
U, C = Lane.UNSHARD, Lane.COMPUTE


@pytest.mark.parametrize(("asked", "reserved"), [(MIB, 2 * MIB), (MIB + 512, 20 * MIB)])
def test_up_to_a_mebibyte_a_tensor_lies_with_the_small_ones(asked, reserved):
    assert memory(by_hand(alloc(C, asked, "a"))).reserved_bytes == reserved


def test_memory_freed_is_used_again_by_its_own_stream_only():
    same = by_hand(alloc(C, 40 * MIB, "a"), free(C, 40 * MIB, "a"), alloc(C, 40 * MIB, "b"))
    other = by_hand(alloc(C, 40 * MIB, "a"), free(C, 40 * MIB, "a"), alloc(U, 40 * MIB, "b"))
    assert memory(same).reserved_bytes == 40 * MIB
    assert memory(other).reserved_bytes == 80 * MIB
    assert memory(other).pools.by_stream == {C: 40 * MIB, U: 40 * MIB}
    assert memory(other).active_bytes == memory(other).peak_bytes == 40 * MIB


def test_a_buffer_of_several_tensors_is_not_freed_in_one_piece():
    """What was cut from it meanwhile keeps its place, so that a later one of the whole size does not fit there."""
    pieces = {"tensors": 2}
    program = by_hand(
        alloc(C, 80 * MIB, "a") | pieces, free(C, 80 * MIB, "a") | pieces, alloc(C, 20 * MIB, "b"),
        alloc(C, 80 * MIB, "c"),
    )  # fmt: skip
    assert memory(program).reserved_bytes == (80 + 80) * MIB


@pytest.mark.parametrize(("issue_s", "reserved"), [(0.0, 80 * MIB), (100.0, 40 * MIB)])
def test_memory_that_another_stream_reads_is_kept_until_it_has_come_that_far(issue_s, reserved):
    """FWD a runs until 10; whether the CPU asks for b before or after decides what the pool needs."""
    record = {"kind": Kind.RECORD_STREAM, "lane": C, "unit": "a", "category": Memory.UNSHARDED}
    forward = {"kind": Kind.OP, "op": Op.FWD, "lane": C}
    program = by_hand(
        alloc(U, 40 * MIB, "a"), forward | {"unit": "a"}, free(U, 40 * MIB, "a"), record,
        forward | {"unit": "b"}, alloc(U, 40 * MIB, "b"),
    )  # fmt: skip
    profile = memory(run(program, lambda i: 10.0, issue_s=issue_s))
    assert profile.peak_bytes == 40 * MIB
    assert (profile.active_bytes, profile.reserved_bytes) == (reserved, reserved)
    assert memory(program).reserved_bytes == 40 * MIB  # without times nothing is known to be kept


def test_a_record_stream_that_follows_no_free_keeps_nothing():
    record = {"kind": Kind.RECORD_STREAM, "lane": C, "unit": "a", "category": Memory.UNSHARDED}
    busy = {"kind": Kind.OP, "op": Op.FWD, "lane": C, "unit": "a"}
    program = by_hand(alloc(U, MIB, "a"), busy, free(U, MIB, "a"), busy, record, alloc(U, MIB, "a"))
    assert memory(run(program, lambda i: 10.0)).active_bytes == MIB


def test_without_the_rate_limiter_memory_grows():
    """FSDP1's gathers run away: every one takes new memory, for compute still reads what was freed."""
    active = {}
    for limit in (True, False):
        program = build(layers_only(12), Plan(api="fsdp1", limit_all_gathers=limit), 8)
        active[limit] = memory(run(program, durations())).active_bytes
    assert active[False] > 1.5 * active[True]
