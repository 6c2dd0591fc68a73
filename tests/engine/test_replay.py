"""Replay says when each operation runs: by hand on small cases, against a second simulator on random ones."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.engine import Contention, replay, run
from fsdp_sim.schedule import Instruction, Kind, Param, Program, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COMM_LANES, Lane, Op, Phase
from fsdp_sim.timeline.analysis import exposed_comm_s, subtract, total_s
from tests.engine.event_driven import replay_event_driven
from tests.engine.programs import anything, by_hand, devices, durations, issuing, layers_only


def forward_end_s(timeline):
    return max(e.end_s for e in timeline.ops if e.op is Op.FWD)


# -- by hand


def test_three_layers_hide_all_but_the_first_gather_and_the_last_reduce():
    timeline = replay(build(layers_only(3), Plan(), 8), durations())
    assert forward_end_s(timeline) == 85  # 10 + 3 * 25
    assert timeline.span_s == 245  # + 3 * 50 + 10


def test_slow_communication_on_one_communicator():
    assert replay(build(layers_only(3), Plan(), 8), durations(gather=40.0, scatter=40.0)).span_s == 380


def test_slow_communication_with_a_communicator_for_reduce_scatters():
    plan = Plan(separate_reduce_scatter_group=True)
    assert replay(build(layers_only(3), plan, 8), durations(gather=40.0, scatter=40.0)).span_s == 350


def after_an_unsharded_layer(iterations, plan):
    """torch's test of ``set_post_optim_event``: FSDP manages the second of two layers, and is its own root."""
    program = build([Unit("second", (Param("w", (8, 4)),), segments=("second", ...))], plan, 8, steps=iterations)
    instructions, forward_of = [], -1
    for i in program:
        if i.phase is Phase.FORWARD and i.step != forward_of:
            forward_of = i.step
            at = {"kind": Kind.OP, "step": i.step, "micro_batch": 0, "lane": Lane.COMPUTE, "unit": "first"}
            instructions.append(Instruction(**at, phase=Phase.FORWARD, op=Op.FWD))
        instructions.append(i)
        if i.op is Op.BWD:
            instructions.append(Instruction(**at, phase=Phase.BACKWARD, op=Op.BWD))
    return Program(program.units, plan, 8, tuple(instructions))


@pytest.mark.parametrize(("event", "expected"), [(False, 5 * (3 * 25 + 10)), (True, 5 * 3 * 25 + 10)])
def test_after_an_optimizer_event_gathers_overlap_what_runs_before_the_root(event, expected):
    program = after_an_unsharded_layer(5, Plan(post_optim_event=event, reshard_after_forward=False))
    seconds = {(i.op, i.unit): 0.0 for i in program.ops}
    seconds |= {(Op.FWD, "first"): 25.0, (Op.BWD, "first"): 50.0, (Op.ALL_GATHER, "second"): 10.0}
    assert replay(program, seconds).span_s == expected


def test_two_gathers_run_ahead_in_forward():
    timeline = replay(build(layers_only(4), Plan(), 8), durations(forward=100.0, gather=10.0))
    gathers = [(e.start_s, e.end_s) for e in timeline.ops if e.op is Op.ALL_GATHER and e.phase is Phase.FORWARD]
    # AG(1) and AG(2) run beside FWD(0), from 10 to 110; AG(3) waits for copy-out 1, which follows FWD(0)
    assert gathers == [(0, 10), (10, 20), (20, 30), (110, 120)]


def test_a_reduce_scatter_ahead_of_it_delays_a_gather():
    timeline = replay(build(layers_only(3), Plan(), 8), durations(scatter=200.0))
    at = {e.label: e for e in timeline.ops if e.phase is Phase.BACKWARD}
    assert at["ALL_GATHER(layers.0)"].start_s == at["REDUCE_SCATTER(layers.2)"].end_s
    scatter = at["REDUCE_SCATTER(layers.2)"].seq
    assert scatter in at["ALL_GATHER(layers.0)"].waits_on


def test_compute_waits_for_the_one_reduce_scatter_input():
    timeline = replay(build(layers_only(3), Plan(), 8), durations(scatter=200.0))
    at = {e.label: e for e in timeline.ops if e.phase is Phase.BACKWARD}
    assert at["rs_copy_in(layers.1)"].start_s == at["REDUCE_SCATTER(layers.2)"].end_s
    assert at["rs_copy_in(layers.1)"].waits_on == (at["REDUCE_SCATTER(layers.2)"].seq,)


def test_the_next_step_gathers_after_the_optimizer():
    slow_optimizer = durations()
    slow_optimizer[Op.OPTIM, ""] = 1000.0
    timeline = replay(build(layers_only(2), Plan(), 8, steps=2), slow_optimizer)
    optimizer = next(e for e in timeline.ops if e.op is Op.OPTIM)
    copy_in = next(e for e in timeline.ops if e.op is Op.AG_COPY_IN and e.step == 1)
    assert copy_in.start_s == optimizer.end_s
    assert copy_in.waits_on == (optimizer.seq,)


def test_a_collective_starts_with_the_last_rank_and_lasts_as_long_as_the_slowest_says():
    given_s = durations()
    given_s[Op.FWD, "layers.0"] = np.array([25.0, 100.0])
    given_s[Op.REDUCE_SCATTER, "layers.0"] = np.array([10.0, 30.0])
    timeline = replay(build(layers_only(1), Plan(), 8), given_s)
    backward = [e for e in timeline.ops if e.op is Op.BWD]
    scatter = [e for e in timeline.ops if e.op is Op.REDUCE_SCATTER]
    assert [(e.rank, e.start_s) for e in backward] == [(0, 35.0), (1, 110.0)]
    assert [(e.rank, e.start_s, e.end_s) for e in scatter] == [(0, 160.0, 190.0), (1, 160.0, 190.0)]


def test_hybrid_sharding_meets_within_the_shard_group_and_across_replicas():
    """2 x 2 ranks: rank 3 is slow in backward, so its shard group's reduce-scatter is late, then both all-reduces."""
    given_s = durations()
    given_s[Op.BWD, "layers.0"] = np.array([50.0, 50.0, 50.0, 90.0])
    given_s[Op.ALL_REDUCE, "layers.0"] = 5.0
    timeline = replay(build(layers_only(1), Plan(shard_size=2), 4), given_s)
    at = {(e.op, e.rank): e.start_s for e in timeline.ops if e.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE)}
    assert [at[Op.REDUCE_SCATTER, rank] for rank in range(4)] == [85, 85, 125, 125]
    assert [at[Op.ALL_REDUCE, rank] for rank in range(4)] == [135] * 4


def test_an_asynchronous_collective_lets_its_stream_go_on():
    gather = {"kind": Kind.OP, "op": Op.ALL_GATHER, "lane": Lane.COMPUTE, "communicator": "shard", "event": 1}
    compute = {"kind": Kind.OP, "op": Op.FWD, "lane": Lane.COMPUTE}
    program = by_hand(
        compute | {"unit": "a"},
        gather | {"unit": "b", "async_op": True},
        compute | {"unit": "c"},
        {"kind": Kind.WAIT, "lane": Lane.COMPUTE, "event": 1, "event_lane": Lane.COMPUTE},
        compute | {"unit": "b"},
    )
    costs = {(i.op, i.unit): 10.0 if i.op is Op.ALL_GATHER else 4.0 for i in program.ops}
    timeline = replay(program, costs)
    assert {e.label: (e.start_s, e.end_s) for e in timeline.ops} == {
        "FWD a": (0, 4), "ALL_GATHER(b)": (4, 14), "FWD c": (4, 8), "FWD b": (14, 18),
    }  # fmt: skip
    assert timeline.lane_order(0, Lane.ALL_GATHER) == ["ALL_GATHER(b)"]
    assert timeline.ops[-1].waits_on == (1,)


@pytest.mark.parametrize("kind", [Kind.CPU_SYNC, Kind.CPU_BLOCK])
def test_the_cpu_issues_nothing_while_it_waits(kind):
    compute = {"kind": Kind.OP, "op": Op.FWD, "lane": Lane.COMPUTE, "unit": "a"}
    event = {"event": 1, "event_lane": Lane.COMPUTE}
    gather = {"kind": Kind.OP, "op": Op.ALL_GATHER, "lane": Lane.UNSHARD, "communicator": "shard", "unit": "a"}
    program = by_hand(compute, {"kind": Kind.RECORD, "lane": Lane.COMPUTE} | event, {"kind": kind} | event, gather)
    played = run(program, lambda i: 5.0)
    assert played.columns.start_s == [0, 5]
    assert played.timeline().ops[1].waits_on == (0,)


def test_an_operation_of_many_kernels_starts_with_its_first_and_ends_after_its_last_is_issued():
    compute = {"kind": Kind.OP, "op": Op.FWD, "lane": Lane.COMPUTE}
    program = by_hand(compute | {"unit": "a"}, compute | {"unit": "b"})
    small = run(program, lambda i: 1.0, issue_s=10.0, launch_s=1.0)  # 10 kernels, each runs 0.1 s
    assert list(zip(small.columns.start_s, small.columns.end_s, strict=True)) == [(1, 10.1), (11, 20.1)]
    large = run(program, lambda i: 40.0, issue_s=10.0, launch_s=1.0)
    assert list(zip(large.columns.start_s, large.columns.end_s, strict=True)) == [(1, 41), (41, 81)]
    whole = run(program, lambda i: 1.0, issue_s=10.0)  # one kernel
    assert list(zip(whole.columns.start_s, whole.columns.end_s, strict=True)) == [(10, 11), (20, 21)]


def test_issue_times_may_be_given_by_operation_or_by_a_function():
    program = build(layers_only(1), Plan(), 8)
    by_key = {(i.op, i.unit): 2.0 if i.op is Op.FWD else 0.0 for i in program.ops}
    for issue_s in (by_key, lambda i: by_key[i.op, i.unit]):
        assert run(program, durations(), issue_s=issue_s).step_time_s() == 10 + 25 + 50 + 10
    del by_key[Op.FWD, "layers.0"]
    with pytest.raises(KeyError, match=r"issue times have no entry for FWD of unit 'layers\.0'"):
        run(program, durations(), issue_s=by_key)


def test_durations_may_be_a_function_asked_once_for_each_distinct_operation():
    program = build(layers_only(3), Plan(), 8, steps=2)
    asked = []
    played = run(program, lambda i: asked.append(i) or durations()[i.op, i.unit])
    assert played.timeline().events == replay(program, durations()).events
    assert len(asked) == len({(i.op, i.unit, i.bytes, i.group_size) for i in program.ops})


def test_events_are_made_of_the_ranks_asked_for():
    program = build(layers_only(2), Plan(), 8)
    played = run(program, durations(), ranks=8)
    assert played.timeline(ranks=[2, 5]).ranks == (2, 5)
    assert played.timeline([2]).issue_order(2) == replay(program, durations()).issue_order(0)
    with pytest.raises(ValueError, match="rank 8 was not played; the run has ranks 0 to 7"):
        played.timeline([8])


def test_a_step_is_timed_from_the_end_of_the_one_before():
    played = run(build(layers_only(3), Plan(), 8, steps=2), durations(), issue_s=1.0)
    assert played.step_time_s(0) + played.step_time_s(1) == played.span_s
    assert played.step_time_s() == played.step_time_s(1)
    with pytest.raises(ValueError, match="step 2 is not in the program, which has steps 0 to 1"):
        played.step_time_s(2)


def test_issuing_takes_cpu_time():
    timeline = replay(build(layers_only(2), Plan(), 8), durations(0.0, 0.0, 0.0, 0.0), issue_s=2.0)
    assert [e.issue_s for e in timeline.ops] == [2.0 * (k + 1) for k in range(len(timeline.ops))]
    assert [e.start_s for e in timeline.ops] == [e.issue_s for e in timeline.ops]


# -- the computing thread issues


def exposed_gathers(timeline):
    """For each forward all-gather, the seconds no compute ran beside it."""
    compute = [(e.start_s, e.end_s) for e in timeline.ops if e.lane is Lane.COMPUTE and e.rank == 0]
    gathers = [e for e in timeline.ops if e.op is Op.ALL_GATHER and e.phase is Phase.FORWARD and e.rank == 0]
    return {e.unit: total_s(subtract([(e.start_s, e.end_s)], compute)) for e in gathers}


def test_on_cpu_the_default_order_exposes_every_forward_gather():
    timeline = replay(build(layers_only(4), Plan(), 4), durations(), device="cpu")
    assert exposed_gathers(timeline) == {f"layers.{i}": 10 for i in range(4)}
    assert forward_end_s(timeline) == 4 * (10 + 25)


def test_on_cpu_explicit_prefetch_hides_all_but_the_first():
    timeline = replay(build(layers_only(4), Plan(forward_prefetch=1), 4), durations(), device="cpu")
    assert exposed_gathers(timeline) == {"layers.0": 10, "layers.1": 0, "layers.2": 0, "layers.3": 0}
    assert forward_end_s(timeline) == 10 + 4 * 25


def test_on_cpu_a_gather_longer_than_the_compute_is_exposed_by_the_difference():
    timeline = replay(build(layers_only(3), Plan(forward_prefetch=1), 4), durations(gather=40.0), device="cpu")
    assert exposed_gathers(timeline) == {"layers.0": 40, "layers.1": 15, "layers.2": 15}


def test_on_cpu_backward_hides_gathers_and_reduce_scatters():
    timeline = replay(build(layers_only(4), Plan(), 4), durations(), device="cpu")
    backward = timeline.select(phase=Phase.BACKWARD)
    # The first gather (nothing prefetches it) and the last reduce-scatter. The others lie beside a backward.
    assert exposed_comm_s(backward, 0) == 10 + 10


def test_on_cpu_an_operation_waits_for_the_thread():
    timeline = replay(build(layers_only(2), Plan(), 4), durations(), device="cpu")
    at = {(e.phase, e.label): e for e in timeline.ops}
    forward = at[Phase.FORWARD, "FWD layers.0"]
    gather = at[Phase.FORWARD, "ALL_GATHER(layers.1)"]
    copy_in = at[Phase.FORWARD, "ag_copy_in(layers.1)"]
    assert gather.issue_s == forward.end_s
    assert forward.seq in copy_in.waits_on
    assert copy_in.seq in gather.waits_on


def test_on_cpu_a_wait_of_the_compute_stream_blocks_the_thread():
    at = {"step": 0, "micro_batch": 0, "phase": Phase.FORWARD}
    gather = {"kind": Kind.OP, "op": Op.ALL_GATHER, "lane": Lane.ALL_GATHER, "communicator": "one"}
    event = {"event": 1, "event_lane": Lane.ALL_GATHER}
    program = Program((), Plan(), 1, (
        Instruction(**at, **gather, unit="first"),
        Instruction(**at, **event, kind=Kind.RECORD, lane=Lane.ALL_GATHER),
        Instruction(**at, **event, kind=Kind.WAIT, lane=Lane.COMPUTE),
        Instruction(**at, **gather | {"lane": Lane.OTHER_COMM, "communicator": "other"}, unit="second"),
    ))  # fmt: skip
    costs = {(Op.ALL_GATHER, "first"): 5.0, (Op.ALL_GATHER, "second"): 1.0}
    assert [e.start_s for e in replay(program, costs, device="cpu")] == [0.0, 5.0]
    assert [e.start_s for e in replay(program, costs, device="gpu")] == [0.0, 0.0]


# -- what is refused


@pytest.mark.parametrize(
    ("change", "kwargs", "error", "message"),
    [
        ({}, {"device": "tpu"}, ValueError, "device is 'tpu'; it must be 'gpu' or 'cpu'"),
        ({}, {"ranks": 9}, ValueError, "ranks is 9; it must be a whole number from 1 to the world size 8"),
        ({}, {"issue_s": -1.0}, ValueError, "issue_s is -1.0"),
        ({}, {"issue_s": lambda i: -1.0}, ValueError, "the issue time of ag_copy_in of unit 'layers.0' is -1.0"),
        ({}, {"launch_s": 0.0}, ValueError, "launch_s is 0.0; it must be a number of seconds > 0"),
        ({(Op.FWD, "layers.0"): -1.0}, {}, ValueError, "duration of FWD of unit 'layers.0' is -1.0; it must be"),
        ({(Op.FWD, "layers.0"): float("nan")}, {}, ValueError, "duration of FWD of unit 'layers.0' is nan"),
        (
            {(Op.FWD, "layers.0"): [1.0, 2.0], (Op.BWD, "layers.0"): [1.0, 2.0, 3.0]},
            {},
            ValueError,
            r"FWD of unit 'layers.0' has shape \(2,\); it must be one number, or one per rank as shape \(3,\)",
        ),
    ],
)
def test_wrong_input_is_named(change, kwargs, error, message):
    given_s = durations()
    given_s.update(change)
    with pytest.raises(error, match=message):
        replay(build(layers_only(2), Plan(), 8), given_s, **kwargs)


@pytest.mark.parametrize("contention", [None, Contention()])
def test_a_wait_for_what_nothing_has_recorded_is_named(contention):
    program = by_hand({"kind": Kind.WAIT, "lane": Lane.COMPUTE, "event": 7})
    with pytest.raises(ValueError, match="the program waits for event 7, which nothing has recorded before"):
        run(program, {}, contention=contention)


def test_a_missing_duration_names_operation_and_unit():
    program = build(layers_only(1), Plan(), 8)
    given_s = {(i.op, i.unit): 1.0 for i in program.ops}
    for copy in (Op.AG_COPY_IN, Op.AG_COPY_OUT, Op.RS_COPY_IN):
        del given_s[copy, "layers.0"]
    with pytest.raises(KeyError, match=r"no entry for ag_copy_in of unit 'layers\.0'.*copies_s=0\.0 makes"):
        replay(program, given_s)
    assert replay(program, given_s, copies_s=0.0).span_s == 5.0  # AG, FWD (beside it the second AG), BWD, RS, OPTIM
    del given_s[Op.BWD, "layers.0"]
    with pytest.raises(KeyError, match=r"no entry for BWD of unit 'layers\.0'"):
        replay(program, given_s, copies_s=0.0)


# -- on any program


def spans(timeline):
    """{(rank, number of the op): (start_s, end_s)}."""
    return {(r, n): (e.start_s, e.end_s) for r in timeline.ranks for n, e in enumerate(timeline.select(rank=r).ops)}


@given(anything, devices, issuing())
def test_equals_a_simulator_that_moves_a_clock(case, device, issue):
    program, seconds, ranks = case
    issue_s, launch_s = issue
    timeline = replay(program, seconds, device=device, ranks=ranks, issue_s=issue_s, launch_s=launch_s)
    expected = replay_event_driven(program, seconds, ranks, device == "cpu", issue_s, launch_s)
    assert spans(timeline) == expected


@given(anything, devices, issuing())
def test_the_pass_for_one_rank_equals_the_pass_for_many(case, device, issue):
    """The first writes numbers, the second arrays; they share no code."""
    program, seconds, _ = case
    issue_s, launch_s = issue
    alone = {key: float(of_rank[0]) for key, of_rank in seconds.items()}
    how = {"device": device, "issue_s": issue_s, "launch_s": launch_s}
    one = run(program, alone, **how)
    as_array = run(program, {key: [value] for key, value in alone.items()}, **how)
    for name in ("issue_s", "clock_s", "start_s", "end_s"):
        assert list(getattr(one.columns, name)) == as_array.of_rank(getattr(as_array.columns, name), 0)


@given(anything, devices)
def test_an_operation_starts_when_the_last_thing_it_waits_for_ends(case, device):
    program, seconds, _ = case
    alone = {key: of_rank[0] for key, of_rank in seconds.items()}  # else a collective may wait for another rank
    timeline = replay(program, alone, device=device)
    last_on_lane = {}
    ops = {e.seq: e for e in timeline.ops}
    for e, i in zip(timeline.ops, program.ops, strict=True):
        before = [ops[s].end_s for s in e.waits_on]
        if not i.async_op:
            before.append(last_on_lane.get(e.lane, 0.0))
            last_on_lane[e.lane] = e.end_s
        assert e.start_s == max(before, default=0.0)


@given(
    st.integers(1, 6),
    st.tuples(*[st.integers(1, 50)] * 4),
    devices,
    st.sampled_from([Plan(), Plan(forward_prefetch=1), Plan(reshard_after_forward=True)]),
)
def test_a_step_lies_between_the_busiest_resource_and_doing_one_thing_at_a_time(n, costs, device, plan):
    forward, _, gather, _ = costs
    timeline = replay(build(layers_only(n), plan, 8), durations(*costs), device=device)
    busy_s = defaultdict(float)
    for e in timeline.ops:
        busy_s["comm" if e.lane in COMM_LANES else "compute"] += e.duration_s
    assert max(busy_s.values()) <= timeline.span_s <= sum(busy_s.values())
    assert forward_end_s(timeline) <= n * (gather + forward)
    if device == "gpu" and gather <= forward:
        assert forward_end_s(timeline) == gather + n * forward
