"""Replay says when each operation runs: by hand on small cases, against a second simulator on random ones."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_sim.engine import replay
from fsdp_sim.schedule import Instruction, Kind, Param, Program, Unit, build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COMM_LANES, Lane, Memory, Op, Phase
from fsdp_sim.timeline.analysis import exposed_comm_s, subtract, total_s
from tests.engine.event_driven import replay_event_driven


def layers_only(n, rows=8):
    """A root without parameters over n equal layers."""
    return [Unit("root", segments=(...,)), *(Unit(f"layers.{i}", (Param("weight", (rows, 4)),)) for i in range(n))]


def durations(forward=25.0, backward=50.0, gather=10.0, scatter=10.0):
    """Seconds by kind of operation, the same for each unit; copies and the optimizer are free."""
    by_op = {Op.FWD: forward, Op.BWD: backward, Op.ALL_GATHER: gather, Op.REDUCE_SCATTER: scatter}

    class ByOp(defaultdict):
        def __missing__(self, key):
            return by_op.get(key[0], 0.0)

    return ByOp()


def forward_end_s(timeline):
    return max(e.end_s for e in timeline.ops if e.op is Op.FWD)


# -- by hand


def test_three_layers_hide_all_but_the_first_gather_and_the_last_reduce():
    timeline = replay(build(layers_only(3), Plan(), 8), durations())
    assert forward_end_s(timeline) == 85  # 10 + 3 * 25
    assert timeline.span_s == 245  # + 3 * 50 + 10


def test_slow_communication_on_one_communicator():
    assert replay(build(layers_only(3), Plan(), 8), durations(gather=40.0, scatter=40.0)).span_s == 380


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


def test_issuing_takes_cpu_time():
    timeline = replay(build(layers_only(2), Plan(), 8), durations(0.0, 0.0, 0.0, 0.0), issue_s=2.0)
    assert [e.issue_s for e in timeline.ops] == [2.0 * (k + 1) for k in range(len(timeline.ops))]
    assert [e.start_s for e in timeline.ops] == [e.issue_s for e in timeline.ops]


def test_memory_follows_the_cpu_and_peaks_at_3_units_forward_and_4_backward():
    program = build(layers_only(6), Plan(), 8)
    timeline = replay(program, durations())
    unit = 8 * 4 * 4
    transient = [e for e in timeline if e.is_memory and e.category is not Memory.RS_OUTPUT]

    def peak(phase):
        live, most = 0, 0
        for e in transient:
            live += e.bytes if e.op is Op.ALLOC else -e.bytes
            most = max(most, live) if e.phase is phase else most
        assert live == 0
        return most / unit

    assert (peak(Phase.FORWARD), peak(Phase.BACKWARD)) == (3, 4)
    _, live = timeline.live_bytes(0)
    assert max(sum(live[c] for c in live if c is not Memory.RS_OUTPUT)) == 4 * unit


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_deeper_prefetch_holds_more_units(depth):
    program = build(layers_only(8), Plan(forward_prefetch=depth, backward_prefetch=depth), 8)
    live, most = 0, defaultdict(int)
    for i in program:
        if i.category in (Memory.NONE, Memory.RS_OUTPUT):
            continue
        live += i.bytes if i.kind is Kind.ALLOC else -i.bytes
        most[i.phase] = max(most[i.phase], live)
    unit = 8 * 4 * 4
    assert most[Phase.FORWARD] == (depth + 2) * unit
    assert most[Phase.BACKWARD] == (depth + 3) * unit


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


@st.composite
def streams(draw):
    """Random operations, collectives, records and waits on random streams, and their durations on each rank."""
    ranks = draw(st.integers(1, 3))
    lanes = list(Lane)
    comm = sorted(COMM_LANES)
    instructions, seconds, recorded = [], {}, []

    def add(kind, **fields):
        instructions.append(Instruction(kind=kind, step=0, micro_batch=0, phase=Phase.FORWARD, **fields))

    for k in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["op", "op", "collective", "collective", "record", "wait", "wait_stream"]))
        if kind in ("op", "collective"):
            together = kind == "collective"
            op = Op.ALL_GATHER if together else Op.FWD
            lane = draw(st.sampled_from(comm if together else lanes))
            communicator = draw(st.sampled_from(["one", "other"])) if together else ""
            add(Kind.OP, lane=lane, op=op, unit=f"u{k}", communicator=communicator)
            seconds[op, f"u{k}"] = draw(st.lists(st.integers(0, 9), min_size=ranks, max_size=ranks))
        elif kind == "record":
            lane = draw(st.sampled_from(lanes))
            recorded.append((len(recorded) + 1, lane))
            add(Kind.RECORD, lane=lane, event=len(recorded), event_lane=lane)
        elif kind == "wait" and recorded:
            event, lane = draw(st.sampled_from(recorded))
            add(Kind.WAIT, lane=draw(st.sampled_from(lanes)), event=event, event_lane=lane)
        else:
            lane, other = draw(st.permutations(lanes))[:2]
            add(Kind.WAIT_STREAM, lane=lane, other=other)
    return Program((), Plan(), ranks, tuple(instructions)), seconds, ranks


@st.composite
def steps_of_training(draw):
    plan = Plan(
        reshard_after_forward=draw(st.sampled_from([True, False, None])),
        forward_prefetch=draw(st.sampled_from([None, 1, 2])),
        backward_prefetch=draw(st.sampled_from([None, 1, 2])),
        grad_accum=draw(st.integers(1, 2)),
    )
    ranks = draw(st.integers(1, 3))
    program = build(toy(draw(st.integers(1, 3))), plan, 4, steps=draw(st.integers(1, 2)))
    keys = sorted({(i.op, i.unit) for i in program.ops})
    return program, {key: [draw(st.integers(0, 9)) for _ in range(ranks)] for key in keys}, ranks


anything = st.one_of(streams(), steps_of_training())
devices = st.sampled_from(["gpu", "cpu"])


def spans(timeline):
    """{(rank, number of the op): (start_s, end_s)}."""
    return {(r, n): (e.start_s, e.end_s) for r in timeline.ranks for n, e in enumerate(timeline.select(rank=r).ops)}


@settings(deadline=None)
@given(anything, devices, st.integers(0, 2))
def test_equals_a_simulator_that_moves_a_clock(case, device, issue_s):
    program, seconds, ranks = case
    timeline = replay(program, seconds, device=device, ranks=ranks, issue_s=issue_s)
    assert spans(timeline) == replay_event_driven(program, seconds, ranks, on_cpu=device == "cpu", issue_s=issue_s)


@settings(deadline=None)
@given(anything, devices, st.data())
def test_nothing_starts_earlier_when_something_takes_longer(case, device, data):
    program, seconds, ranks = case
    before = spans(replay(program, seconds, device=device, ranks=ranks))
    if seconds:
        key = data.draw(st.sampled_from(sorted(seconds)))
        seconds = seconds | {key: [s + data.draw(st.integers(1, 9)) for s in seconds[key]]}
    after = spans(replay(program, seconds, device=device, ranks=ranks))
    assert all(after[op] >= before[op] for op in before)


@settings(deadline=None)
@given(anything, devices)
def test_a_lane_does_one_thing_at_a_time_in_issue_order(case, device):
    program, seconds, ranks = case
    timeline = replay(program, seconds, device=device, ranks=ranks)
    for rank in range(ranks):
        for lane in Lane:
            mine = timeline.select(rank=rank, lane=lane).ops
            assert all(a.end_s <= b.start_s for a, b in pairwise(mine))


@settings(deadline=None)
@given(anything, devices)
def test_an_operation_starts_when_the_last_thing_it_waits_for_ends(case, device):
    program, seconds, _ = case
    alone = {key: of_rank[0] for key, of_rank in seconds.items()}  # else a collective may wait for another rank
    timeline = replay(program, alone, device=device)
    last_on_lane = {}
    ops = {e.seq: e for e in timeline.ops}
    for e in timeline.ops:
        before = [ops[s].end_s for s in e.waits_on] + [last_on_lane.get(e.lane, 0.0)]
        assert e.start_s == max(before)
        last_on_lane[e.lane] = e.end_s


@settings(deadline=None)
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
