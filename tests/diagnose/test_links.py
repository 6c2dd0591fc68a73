"""Chains and critical paths are read off events alone, and agree with what the engine finds from the program."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from fsdp_sim import Cluster, Plan, Timeline, simulate
from fsdp_sim.diagnose.causes import Cause
from fsdp_sim.diagnose.critical_path import critical_path_of_run
from fsdp_sim.diagnose.links import Links, chain, critical_path
from fsdp_sim.engine import straggler
from fsdp_sim.timeline import Event, Header, Lane, Op
from fsdp_sim.timeline.analysis import step_time_s

Run = Callable[..., Timeline]
LLAMA = {"micro_batch": 1, "seq_len": 4096, "param_dtype": "bf16", "activation_checkpointing": "full"}
PLANS = {
    "fsdp2": {},
    "fsdp2, not resharded": {"reshard_after_forward": False},
    "fsdp1": {"api": "fsdp1"},
    "hsdp": {"shard_size": 8},
    "accumulation": {"grad_accum": 2},
    "offload": {"cpu_offload": True},
    "ddp": {"api": "ddp"},
    "zero2": {"api": "zero2"},
}


def event(seq: int, op: Op, start_s: float, end_s: float, rank: int = 0, **fields: object) -> Event:
    lane = {Op.ALL_GATHER: Lane.ALL_GATHER}.get(op, Lane.COMPUTE)
    return Event(**{"seq": seq, "rank": rank, "op": op, "lane": lane, "unit": "u", "issue_s": 0.0} | fields
                 | {"start_s": start_s, "end_s": end_s})  # fmt: skip


def timeline(*events: Event, world_size: int = 1) -> Timeline:
    return Timeline(Header(producer="tests", clock="measured", world_size=world_size), events)


def test_an_operation_begins_by_the_latest_of_what_it_waited_for_its_lane_and_its_issue() -> None:
    gather, before = event(0, Op.ALL_GATHER, 0, 2), event(1, Op.FWD, 0, 1, unit="before")
    links = Links(timeline(gather, before, event(2, Op.FWD, 2, 3, waits_on=(0,))), 0)
    assert links.cause((0, 2)) == Cause("event", (0, 0), 0)
    links = Links(timeline(event(0, Op.ALL_GATHER, 0, 0.5), before, event(2, Op.FWD, 1, 3, waits_on=(0,))), 0)
    assert links.cause((0, 2)) == Cause("lane", (0, 1), 0)
    links = Links(timeline(gather, before, event(2, Op.FWD, 2.5, 3, waits_on=(0,), issue_s=2.5)), 0)
    assert links.cause((0, 2)) == Cause("CPU", None, 0)
    assert links.cause((0, 1)) == Cause("CPU", None, 0)


def test_a_collective_begins_when_the_last_rank_of_its_group_has_come() -> None:
    def rank(number: int, ready_s: float) -> list[Event]:
        fields = {"rank": number, "group_size": 2, "waits_on": (0,)}
        return [event(0, Op.FWD, 0, ready_s, rank=number), event(1, Op.ALL_GATHER, 3, 4, **fields)]

    links = Links(timeline(*rank(0, 1), *rank(1, 3), world_size=2), 0)
    assert links.cause((0, 1)) == links.cause((1, 1)) == Cause("event", (1, 0), 1)
    assert [piece.key for piece in links.critical_path()] == [(1, 0), (1, 1)]


def test_a_chain_leads_back_to_the_start_and_names_who_waits(tiny: Timeline) -> None:
    assert chain(tiny, 0, 2).before == ((0, 1),)
    assert chain(tiny, 0, 2).waited_for == ((0, 1),)
    assert chain(tiny, 0, 1).after == ((0, 2),)


def test_the_chain_of_a_late_all_gather_goes_back_through_the_cpu(training_run: Run) -> None:
    run = training_run(ranks=1, steps=1)
    gathers = [e for e in run.ops if e.label == "ALL_GATHER(layers.1)"]
    labels = {(e.rank, e.seq): e.label for e in run.ops}
    before = [labels[key] for key in chain(run, 0, gathers[0].seq).before]
    assert before == ["FWD layers.0", "ALL_GATHER(layers.0)", "FWD embed", "ALL_GATHER(embed)"]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_path_of_a_simulated_step_is_that_of_the_engine(plan: dict[str, object]) -> None:
    simulated = simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=16), Plan(**LLAMA | plan))
    run, record = simulated.run, simulated.timeline
    step = max(record.steps)
    theirs = critical_path_of_run(run, step)
    ops = record.ops
    ours = critical_path(record, step)
    assert sum(p.seconds for p in ours) == pytest.approx(step_time_s(record, step))
    assert all(b.start_s == pytest.approx(a.end_s) for a, b in pairwise(ours))
    keys = {(piece.key[1], piece.cpu) for piece in ours}
    shared_s = sum(p.seconds for p in theirs if (ops[p.key[1]].seq, p.cpu) in keys)
    assert shared_s == pytest.approx(run.step_time_s(step), rel=1e-3)


def test_with_a_straggler_the_path_stays_on_the_rank_that_all_wait_for() -> None:
    def skew(seconds: object, ranks: int) -> object:
        return straggler(seconds, ranks, rank=3, factor=1.5)

    plan = Plan(micro_batch=8, seq_len=1024, param_dtype="bf16")
    simulated = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=4), plan, skew=skew)
    path = critical_path(simulated.timeline, 0)
    assert sum(p.seconds for p in path if p.key[0] == 3) > 0.95 * sum(p.seconds for p in path)


def test_where_the_cpu_computes_the_path_has_no_overlaps_and_goes_through_what_it_computes(training_run: Run) -> None:
    run = training_run(clock="measured")
    path = critical_path(run, 1)
    assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(path))
    assert sum(p.seconds for p in path) == pytest.approx(step_time_s(run, 1))
    ops = {(e.rank, e.seq): e.op for e in run.ops}
    assert sum(ops[p.key] is Op.FWD for p in path) == sum(ops[p.key] is Op.BWD for p in path) == 6
    assert {p.key[0] for p in path if ops[p.key] is Op.BWD} == {3}  # the slowest


def test_where_a_path_goes_over_to_a_rank_that_ended_later_no_time_counts_twice() -> None:
    def gather(rank: int, start_s: float, end_s: float) -> Event:
        return event(0, Op.ALL_GATHER, start_s, end_s, rank=rank, group_size=2, issue_s=start_s)

    forward = event(1, Op.FWD, 5.2, 6, issue_s=5.2, waits_on=(0,))
    path = critical_path(timeline(gather(0, 0, 5), gather(1, 1, 5.5), forward, world_size=2), 0)
    assert [(p.key, p.cpu, p.start_s, p.end_s) for p in path] == [
        ((1, 0), True, 0, 1), ((1, 0), False, 1, 5), ((0, 1), True, 5, 5.2), ((0, 1), False, 5.2, 6)
    ]  # fmt: skip


def test_operations_that_take_no_time_and_wait_for_each_other_end_the_walk() -> None:
    both = timeline(event(0, Op.FWD, 0, 0, waits_on=(1,)), event(1, Op.ALL_GATHER, 0, 0, waits_on=(0,)))
    assert critical_path(both, 0) == []
    assert len(chain(both, 0, 0).before) <= 1


def test_what_is_no_operation_is_named(tiny: Timeline) -> None:
    with pytest.raises(ValueError, match=r"rank 0, seq 0 is alloc\(layers\.0\) of the timeline, which takes no time"):
        chain(tiny, 0, 0)
    with pytest.raises(ValueError, match=r"rank 5, seq 1 is an event of the timeline, of which it has none; its ranks"):
        chain(tiny, 5, 1)
    with pytest.raises(ValueError, match=r"step 4 has no operations; the steps that have some are \[0\]"):
        critical_path(tiny, 4)
