"""A scenario for each culprit; totals, choices of step and rank, words and what is said to be missing."""

import dataclasses
import re
from collections import Counter
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch.distributed.fsdp import FSDPModule

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.diagnose import Culprit, Diagnosis, diagnose
from fsdp_sim.diagnose.advice import TIPS, Facts
from fsdp_sim.diagnose.look import look
from fsdp_sim.diagnose.sentences import SAID, SAY
from fsdp_sim.engine import run
from fsdp_sim.schedule import Kind, build, toy
from fsdp_sim.timeline import Header, Lane, Op, Phase, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s, overlap, spans_of, step_time_s, subtract, total_s
from tests.diagnose.scenarios import idle_by_culprit, played
from tests.engine.programs import by_hand, devices, durations, issuing, layers_only, steps_of_training
from tests.timeline.strategies import gather, op, timeline_of, timelines

FSDP1 = Plan(api="fsdp1")


def measured(timeline: Timeline, device: str = "gpu", waits: bool = True, **header) -> Timeline:
    """The same timeline as if a profiler had measured it, with or without what waited for what. It sees the launch of a
    kernel some microseconds before the kernel."""
    launch_s = 0.0 if device == "cpu" else 5e-6
    events = [structs.replace(e, issue_s=e.issue_s - launch_s) for e in timeline.events]
    events = events if waits else [structs.replace(e, waits_on=()) for e in events]
    return Timeline(structs.replace(timeline.header, clock="measured", device=device, **header), events)


def limited() -> Timeline:
    """FSDP1's limiter holds the second all-gather back until the first unit has computed."""
    block = {"kind": Kind.CPU_BLOCK, "event": 1, "event_lane": Lane.COMPUTE}
    compute = {"kind": Kind.OP, "op": Op.FWD, "lane": Lane.COMPUTE}
    all_gather = {"kind": Kind.OP, "op": Op.ALL_GATHER, "lane": Lane.UNSHARD, "communicator": "shard", "unit": "b"}
    program = by_hand(
        compute | {"unit": "a"}, {"kind": Kind.RECORD, "lane": Lane.COMPUTE, "event": 1}, block, all_gather,
        {"kind": Kind.WAIT_STREAM, "lane": Lane.COMPUTE, "other": Lane.UNSHARD}, compute | {"unit": "b"},
        plan=FSDP1,
    )  # fmt: skip
    return run(program, lambda i: 5.0).timeline()


def straggling() -> Timeline:
    seconds = durations(gather=5.0)
    for k in range(3):
        seconds[Op.FWD, f"layers.{k}"] = np.array([25.0, 60.0])
    return run(build(layers_only(3), Plan(), 8), seconds).timeline()


def sized(sizes: dict[str, int], alpha_s: float, bytes_per_s: float, compute_s: float) -> Timeline:
    """Forward of some units of those sizes, each gathered beside the compute of the one before, on a wire."""
    events, computed_s, gathered_s = [], 0.0, 0.0
    for seq, (unit, n_bytes) in enumerate(sizes.items()):
        fields = {"unit": unit, "phase": Phase.FORWARD}
        start_s, end_s = gathered_s, gathered_s + alpha_s + n_bytes * 7 / 8 / bytes_per_s
        all_gather = gather(start_s, end_s, seq=2 * seq, bytes=n_bytes, group_size=8, **fields)
        begin_s = max(end_s, computed_s)
        events.append(structs.replace(all_gather, issue_s=0.0, waits_on=(2 * seq - 3,) if seq > 1 else ()))
        events.append(op(begin_s, begin_s + compute_s, seq=2 * seq + 1, **fields))
        events[-1] = structs.replace(events[-1], issue_s=0.0, waits_on=(2 * seq,))
        gathered_s, computed_s = end_s, begin_s + compute_s
    return timeline_of(*events)


CASES = {
    "first gather and last reduction": (lambda: played(), {Culprit.FIRST_ALL_GATHER: 10, Culprit.LAST_REDUCTIONS: 10}),
    "gathers behind reductions": (lambda: played(gather=40.0, scatter=40.0), {Culprit.HEAD_OF_LINE: 30}),
    "network too slow": (lambda: played(layers=6, gather=40.0, scatter=0.0), {Culprit.NETWORK: 75}),
    "one input buffer": (lambda: played(layers=4, scatter=200.0), {Culprit.RS_BUFFER: 450}),
    "slow CPU": (
        lambda: played(forward=0.1, backward=0.1, gather=0.1, scatter=0.1, issue_s=1.0), {Culprit.CPU_LATE: 5}
    ),
    "computing thread": (lambda: played(layers=4, device="cpu"), {Culprit.COMPUTING_THREAD: 40}),
    "asynchronous gathers": (lambda: played(Plan(unshard_async_op=True), layers=4), {Culprit.ASYNCHRONOUS: 30}),
    "ZeRO": (lambda: played(Plan(api="zero2"), units=toy(3)), {Culprit.LAST_ALL_GATHERS: 1}),
    "slow rank": (straggling, {Culprit.SLOW_RANK: 1}),
    "limiter": (limited, {Culprit.RATE_LIMITER: 5}),
    "small units": (lambda: sized({"a": 10**4, "b": 10**6, "c": 10**4, "d": 10**4}, 1e-3, 1e10, 1e-4),
                    {Culprit.SMALL: 1e-3}),
    "large units": (lambda: sized({"a": 10**4, "b": 10**8, "c": 10**8}, 1e-5, 1e10, 1e-4), {Culprit.NETWORK: 1e-2}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_culprit_is_found_where_it_is(case):
    make, expected = CASES[case]
    made = make()
    timeline = made if isinstance(made, Timeline) else made.timeline()

    found = idle_by_culprit(timeline)
    for culprit, at_least in expected.items():
        assert found.get(culprit, 0.0) >= at_least, found


CURES = {
    Culprit.HEAD_OF_LINE: ({"gather": 40.0, "scatter": 40.0}, Plan(), Plan(separate_reduce_scatter_group=True)),
    Culprit.RS_BUFFER: (
        {"scatter": 80.0, "layers": 6}, Plan(separate_reduce_scatter_group=True),
        Plan(separate_reduce_scatter_group=True, reduce_scatter_max_input_buffers=2),
    ),
    Culprit.COMPUTING_THREAD: ({"device": "cpu", "layers": 4}, Plan(), Plan(forward_prefetch=1)),
    Culprit.ASYNCHRONOUS: ({"layers": 4}, Plan(unshard_async_op=True), Plan()),
    Culprit.NETWORK: ({"layers": 6, "gather": 60.0, "scatter": 0.0}, Plan(), Plan(reshard_after_forward=False)),
}  # fmt: skip


@pytest.mark.parametrize("culprit", CURES)
def test_what_is_advised_helps(culprit):
    """Each is the advice of that culprit, followed."""
    how, ill, cured = CURES[culprit]

    before, after = (played(plan, **how) for plan in (ill, cured))
    assert idle_by_culprit(after.timeline()).get(culprit, 0.0) < idle_by_culprit(before.timeline())[culprit]
    assert after.step_time_s() <= before.step_time_s()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in ("limiter", "slow rank", "asynchronous gathers")]
)
def test_a_measured_timeline_that_does_not_say_what_waited_for_what_has_the_same_culprits(case):
    made = CASES[case][0]()
    timeline = made if isinstance(made, Timeline) else made.timeline()
    device = timeline.header.device or "gpu"

    with_waits, without = idle_by_culprit(timeline), idle_by_culprit(measured(timeline, device, waits=False))
    main = max(with_waits, key=with_waits.get)
    assert without.get(main, 0.0) == pytest.approx(with_waits[main], rel=0.1)


# -- evidence


def test_messages_of_one_size_do_not_tell_latency_from_bandwidth_and_a_bandwidth_does():
    timeline = measured(sized({"a": 10**6, "b": 10**6, "c": 10**6}, 1e-3, 1e10, 1e-4))

    alone, given = diagnose(timeline), diagnose(timeline, bandwidth_gbps=80)
    assert any("bandwidth_gbps" in note for note in alone.notes)
    assert Culprit.SMALL not in {blame.culprit for blame in alone.culprits}
    assert Culprit.SMALL in {blame.culprit for blame in given.culprits}


def test_a_cluster_says_what_its_network_takes():
    sim = simulate("gpt2-1.5b", Cluster("A100-SXM-40GB", gpus=64, bandwidth_gbps=10), Plan())

    found = diagnose(sim.timeline, cluster=sim.cluster)
    assert found.culprits[0].culprit is Culprit.NETWORK or Culprit.NETWORK in {b.culprit for b in found.culprits}


def test_a_network_below_what_was_given_is_said():
    timeline = measured(sized({"a": 10**8, "b": 10**8, "c": 10**8}, 0.0, 1e9, 1e-4))

    assert any("reach 10% of the bandwidth" in note for note in diagnose(timeline, bandwidth_gbps=80).notes)


def test_one_rank_alone_cannot_tell_a_slow_rank_and_says_so():
    timeline = measured(straggling())

    one, both = diagnose(timeline.select(rank=0)), diagnose(timeline)
    assert any("Give the traces of the other ranks" in note for note in one.notes)
    assert not any("traces of the other ranks" in note for note in both.notes)
    assert any("always for rank 1" in blame.sentence for blame in both.culprits)


def test_kernels_that_spin_until_everybody_has_come_show_the_slow_rank_by_their_length():
    """NCCL's kernel starts when its own rank comes; the rank that came last has the shortest."""
    fields = {"unit": "a", "bytes": 8, "group_size": 2, "phase": Phase.FORWARD, "seq": 1}
    early = [op(0.0, 1.0, unit="x", rank=0), gather(1.0, 5.0, rank=0, **fields)]
    late = [op(0.0, 4.0, unit="x", rank=1), gather(4.0, 5.0, rank=1, **fields)]
    after = [op(5.0, 6.0, unit="a", rank=rank, seq=2, waits_on=(1,), issue_s=0.0) for rank in (0, 1)]
    timeline = measured(timeline_of(*early, *late, *after))

    (blame,) = [b for b in diagnose(timeline, rank=0).culprits if b.culprit is Culprit.SLOW_RANK]
    assert blame.idle_s == 4.0
    assert "always for rank 1" in blame.sentence
    assert Culprit.SLOW_RANK not in idle_by_culprit(timeline, rank=1)


def test_a_trace_without_issue_times_says_so():
    timeline = timeline_of(op(0.0, 1.0), gather(1.0, 2.0, group_size=8), op(2.0, 3.0))
    header = structs.replace(timeline.header, clock="measured", device="gpu")
    timeline = Timeline(header, timeline.events)

    assert any("does not say when the CPU issued" in note for note in diagnose(timeline).notes)


def test_a_cpu_that_waits_for_the_device_to_be_done_is_a_host_sync():
    """Ten launches of 10 us, a sync until all is computed, and ten more."""
    events, device_s = [], 0.0
    cpu_s = 0.0
    for k in range(30):
        if k % 10 == 0:
            cpu_s = device_s + 2e-6 if k else 0.0
        cpu_s += 10e-6
        start_s = max(device_s, cpu_s + 5e-6)
        device_s = start_s + 1e-3
        events.append(structs.replace(op(start_s, device_s, unit=f"l{k}", seq=k), issue_s=cpu_s))
    timeline = measured(timeline_of(*events))
    assert Culprit.CPU_LATE in idle_by_culprit(timeline)

    (blame,) = diagnose(timeline).culprits
    assert "a host sync" in blame.sentence
    assert ".item()" in blame.advice[0]


# -- choices, totals, words


def test_totals_are_those_of_the_step():
    found = diagnose(played().timeline())

    assert (found.step_s, found.compute_s, found.comm_s, found.exposed_s, found.idle_s) == (245, 225, 90, 20, 0)
    assert found.overlap == pytest.approx(70 / 90)
    assert (found.api, found.device, found.rank, found.step) == ("fsdp2", "gpu", 0, 0)


def test_the_step_of_median_length_is_looked_at_and_any_other_if_asked():
    found = [op(10.0 * k, 10.0 * k + length, step=k, seq=k) for k, length in enumerate((9.0, 1.0, 2.0, 3.0))]
    timeline = timeline_of(*found, clock="measured")

    assert diagnose(timeline).step == 2
    three = diagnose(timeline, step=3)
    assert three.step_s == pytest.approx(3.0)
    assert three.between_steps_s == pytest.approx(8.0)
    assert any("8,000 ms pass" in note for note in three.notes)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ({"step": 7}, "no step 7 in it; there are 0"),
        ({"rank": 3}, "no rank 3 in it; there are 0"),
        ({"bandwidth_gbps": 0.0}, "bandwidth_gbps is 0.0"),
    ],
)
def test_what_is_not_there_is_named(which, words):
    with pytest.raises(ValueError, match=words):
        diagnose(played().timeline(), **which)


def test_a_timeline_without_operations_is_named():
    with pytest.raises(ValueError, match="has no operations"):
        diagnose(Timeline(Header(producer="", clock="measured", world_size=1), []))


@given(timelines(), st.data())
def test_whatever_a_timeline_holds_it_can_be_diagnosed(timeline, data):
    """Events at random times that wait for themselves, for what comes later, or for what is not there."""
    if not timeline.ops:
        return
    step = data.draw(st.sampled_from(sorted({e.step for e in timeline.ops})))
    rank = data.draw(st.sampled_from(timeline.ranks))

    found = diagnose(timeline, step=step, rank=rank)
    assert found.headline
    assert str(found)
    assert msgspec.json.decode(msgspec.json.encode(found), type=Diagnosis) == found
    assert found.exposed_s == pytest.approx(exposed_comm_s(timeline.select(step=step), rank), abs=1e-6)
    assert sum(row.exposed_s for row in found.collectives) == pytest.approx(found.exposed_s, abs=1e-6)


def test_hidden_communication_is_said_to_be_hidden():
    fields = {"unit": "a", "group_size": 8, "bytes": 8}
    found = diagnose(timeline_of(op(0.0, 10.0), gather(1.0, 2.0, **fields)))

    assert "its communication is hidden" in found.headline
    assert found.collectives[0].culprit is None
    assert "hidden behind compute" in found.collectives[0].sentence


def test_a_step_that_hardly_communicates_is_said_to_hardly_communicate():
    """0.05 of 20 s on the wire, all of it alone: that is neither hidden nor worth a remedy."""
    found = diagnose(timeline_of(op(0.0, 19.9), gather(19.93, 19.98), op(19.98, 20.0)))

    assert "next to no communication: 50.0 ms are in flight, 50.0 ms of them exposed" in found.headline
    assert "hidden" not in found.headline


steps = st.lists(st.tuples(st.sampled_from(["compute", "gather", "reduce"]), st.integers(0, 400), st.integers(1, 150)))


@settings(max_examples=300)
@given(steps.filter(bool), st.sampled_from([1, 1, 20, 300]))
def test_what_a_headline_and_a_collective_claim_is_what_their_numbers_say(some, longest):
    """Steps of every kind: all compute, all wire, side by side or alone, and very long ones with a little of either."""
    kinds = {
        "compute": op,
        "gather": partial(gather, unit="a", group_size=8),
        "reduce": partial(op, kind=Op.REDUCE_SCATTER, lane=Lane.REDUCE_SCATTER, unit="b", group_size=8),
    }
    found = [kinds[kind](at, at + length) for kind, at, length in some]
    found[0] = structs.replace(found[0], end_s=found[0].end_s * longest)
    timeline = timeline_of(*found)
    d = diagnose(timeline)
    comm_s, exposed_s = d.comm_s, exposed_comm_s(timeline, 0)

    if "without any communication" in d.headline:
        assert comm_s == 0
    elif "next to no communication" in d.headline:
        assert 0 < comm_s <= 0.005 * d.step_s
    elif "is hidden" in d.headline:
        assert exposed_s <= min(0.1 * comm_s, 0.005 * d.step_s)
    else:
        assert re.search(r"; [\d,.]+ m?s \(.*\) are exposed communication", d.headline), d.headline
        assert exposed_s > 0
    busy = [e for e in timeline.ops if e.lane is Lane.COMPUTE]
    for row in d.collectives:
        own = [e for e in timeline.ops if (e.op, e.unit) == (row.op, row.unit)]
        alone_s = total_s(subtract(spans_of(own), spans_of(busy)))
        if "hidden behind compute" in row.sentence:
            assert alone_s == 0
        elif "beside another collective" in row.sentence:
            assert row.exposed_s == 0 < alone_s <= exposed_s
        else:
            assert 0 < row.exposed_s <= alone_s


def test_collectives_are_listed_by_unit_with_their_bandwidth():
    sim = simulate("gpt2-124m", Cluster("A100-SXM-40GB", gpus=8), Plan(grad_accum=2))
    found = diagnose(sim.timeline)

    exposed = [round(row.exposed_s, 12) for row in found.collectives]
    assert exposed == sorted(exposed, reverse=True)
    row = next(r for r in found.collectives if (r.phase, r.op, r.unit) == ("forward", "ALL_GATHER", "layers.3"))
    assert row.times == 2
    assert row.group_size == 8
    assert row.bus_gbps == pytest.approx(2 * row.bytes * 7 / 8 * 8e-9 / row.total_s)
    assert row.bus_gbps < sim.cluster.intra_link.bytes_per_s * 8e-9


# -- what to try


def test_every_culprit_has_a_sentence_and_advice():
    assert {*SAY, *SAID} == set(TIPS) == set(Culprit)
    assert all(TIPS[culprit] for culprit in Culprit if culprit is not Culprit.UNKNOWN)


def test_advice_names_what_torch_has():
    """FSDP2's setters are methods of its modules."""
    said = {
        word
        for tips in TIPS.values()
        for tip in tips
        for word in re.findall(r"\b_?set_\w+", tip.by_api.get("fsdp2", ""))
    }

    assert {"set_modules_to_forward_prefetch", "set_separate_reduce_scatter_group"} <= said
    assert not [word for word in said if not hasattr(FSDPModule, word)]


def test_advice_is_for_the_api_of_the_trace():
    """An all-gather behind a reduction: FSDP2 has a setting, FSDP1 has not."""
    texts = {}
    for plan in (Plan(), FSDP1):
        found = diagnose(played(plan, units=toy(4), gather=60.0, scatter=60.0).timeline())
        texts[plan.api] = " ".join(tip for blame in found.culprits for tip in blame.advice)
        assert found.api == plan.api
    assert "fully_shard(" in texts["fsdp2"] or "set_" in texts["fsdp2"]
    assert "set_" not in texts["fsdp1"]
    assert "limit_all_gathers" not in texts["fsdp2"]


def test_what_is_done_already_is_not_advised():
    half, whole = (
        diagnose(simulate("gpt2-1.5b", Cluster("A100-SXM-40GB", gpus=64), Plan(param_dtype=dtype)).timeline)
        for dtype in ("bf16", None)
    )

    def tips(found):
        return Counter("param_dtype=torch.bfloat16" in tip for blame in found.culprits for tip in blame.advice)

    assert tips(whole)[True]
    assert not tips(half)[True]


@pytest.mark.parametrize(("gbps", "micro_batch", "saturated"), [(25, 1, True), (400, 4, False)])
def test_where_the_network_never_rests_another_order_is_not_advised(gbps, micro_batch, saturated):
    """There the simulator finds no gain in a communicator for reductions, and a large one in fewer bytes."""
    cluster = Cluster("A100-SXM-40GB", gpus=64, bandwidth_gbps=gbps)
    plan = Plan(param_dtype="bf16", reduce_dtype="fp32", micro_batch=micro_batch)
    sim = simulate("gpt2-1.5b", cluster, plan)
    found = diagnose(sim.timeline)

    told = " ".join(tip for blame in found.culprits for tip in blame.advice)
    assert ("no other order makes it shorter" in found.headline) == saturated
    assert ("set_reduce_scatter_max_input_buffers" not in told) == saturated
    assert "reduce_dtype=torch.bfloat16" in told
    if saturated:
        other_order = dataclasses.replace(plan, separate_reduce_scatter_group=True, reduce_scatter_max_input_buffers=2)
        fewer_bytes = dataclasses.replace(plan, reduce_dtype="bf16")
        assert simulate("gpt2-1.5b", cluster, other_order).step_time_s > 0.99 * sim.step_time_s
        assert simulate("gpt2-1.5b", cluster, fewer_bytes).step_time_s < 0.9 * sim.step_time_s


@pytest.mark.parametrize(
    ("plan", "prefetched", "gathered_by"),
    [
        (Plan(), False, 8),
        (Plan(forward_prefetch=1), True, 8),
        (Plan(forward_prefetch=2), True, 8),
        (Plan(shard_size=4), False, 4),
        (Plan(api="fsdp1"), False, 8),
        (Plan(api="ddp"), False, 1),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_advice_knows_what_is_prefetched_and_who_gathers(plan, prefetched, gathered_by, device):
    facts = Facts.of(look(played(plan, units=toy(5), device=device).timeline()))

    assert facts.forward_prefetch == prefetched
    assert facts.group_size == gathered_by
    assert facts.backward_gathers == (plan.api != "ddp")


@given(steps_of_training(), devices, issuing(), st.data())
def test_any_run_can_be_diagnosed_and_its_numbers_are_those_of_the_timeline(case, device, issue, data):
    program, seconds, ranks = case
    issue_s, launch_s = issue
    timeline = run(program, seconds, device=device, ranks=ranks, issue_s=issue_s, launch_s=launch_s).timeline()
    if not timeline.span_s:
        return
    step, rank = data.draw(st.sampled_from(timeline.steps)), data.draw(st.sampled_from(timeline.ranks))

    found = diagnose(timeline, step=step, rank=rank)
    one = timeline.select(step=step)
    assert found.step_s == pytest.approx(step_time_s(timeline, step))
    assert found.exposed_s == pytest.approx(exposed_comm_s(one, rank))
    assert found.overlap == pytest.approx(overlap(one, rank))
    assert sum(blame.exposed_s for blame in found.culprits) == pytest.approx(found.exposed_s)
    assert sum(row.exposed_s for row in found.collectives) == pytest.approx(found.exposed_s)
    idle_s = sum(blame.idle_s for blame in found.culprits)
    if len(timeline.steps) == 1:  # else what another step computes keeps compute from being idle too
        assert idle_s + found.compute_s == pytest.approx(found.step_s)
    assert found.headline
    assert all(blame.sentence for blame in found.culprits)
