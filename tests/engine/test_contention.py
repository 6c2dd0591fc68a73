"""Operations that slow each other: by hand on small cases, equal to the plain pass where nothing slows anything."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsdp_sim.engine import Contention, run
from fsdp_sim.schedule import Kind, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Op
from tests.engine.programs import anything, by_hand, devices, durations, issuing, layers_only

COMPUTE = {"kind": Kind.OP, "op": Op.FWD, "lane": Lane.COMPUTE, "unit": "c"}
GATHER = {"kind": Kind.OP, "op": Op.ALL_GATHER, "lane": Lane.ALL_GATHER, "unit": "g", "communicator": "shard"}
REDUCE = {"kind": Kind.OP, "op": Op.ALL_REDUCE, "lane": Lane.ALL_REDUCE, "unit": "r", "communicator": "replicate"}

COPIES = {Op.H2D, Op.D2H, Op.ACT_H2D, Op.ACT_D2H}


def spans(contention, *ops, world_size=1, **seconds):
    """Start and end of operations all issued at time 0, each as long as ``seconds`` says of its unit."""
    program = by_hand(*ops, world_size=world_size)
    played = run(program, {(i.op, i.unit): seconds[i.unit] for i in program.ops}, contention=contention)
    return list(zip(played.columns.start_s, played.columns.end_s, strict=True))


# -- by hand


def test_compute_is_slower_while_a_collective_is_in_flight():
    # 4 s beside the collective do 2 s of work; the other 8 s are at full rate
    assert spans(Contention(compute_slowdown_by_collective=2.0), COMPUTE, GATHER, c=10.0, g=4.0) == [(0, 12), (0, 4)]


def test_a_collective_is_slower_while_something_computes():
    assert spans(Contention(collective_slowdown_by_compute=2.0), COMPUTE, GATHER, c=4.0, g=10.0) == [(0, 4), (0, 12)]


def test_both_ways_at_once():
    contention = Contention(compute_slowdown_by_collective=2.0, collective_slowdown_by_compute=4.0)
    # both slow until 8: compute has done 4, the collective 2 of its 10
    assert spans(contention, COMPUTE, GATHER, c=4.0, g=10.0) == [(0, 8), (0, 16)]


def test_two_collectives_in_flight_slow_compute_twice_as_much():
    contention = Contention(compute_slowdown_by_collective=1.5)
    # 4 s beside both at rate 1/2, 4 s beside one at rate 1/1.5
    (_, end), *_ = spans(contention, COMPUTE, GATHER, REDUCE, c=10.0, g=4.0, r=8.0)
    assert end == pytest.approx(8 + (10 - 2 - 4 / 1.5))


def test_collectives_of_two_communicators_share_the_network_card():
    # each at half rate until 8, when the shorter is done; the other has 6 of its 10 left
    assert spans(Contention(nic_share=1.0), GATHER, REDUCE, g=4.0, r=10.0) == [(0, 8), (0, 14)]


@pytest.mark.parametrize(("share", "end"), [(0.0, 4), (0.5, 4), (0.75, 6), (1.0, 8)])
def test_the_card_is_shared_as_far_as_both_together_need_more_than_all_of_it(share, end):
    assert spans(Contention(nic_share=share), GATHER, REDUCE, g=4.0, r=4.0) == [(0, end), (0, end)]


def test_a_collective_that_does_not_use_the_card_shares_nothing():
    assert spans(Contention(nic_share={"shard": 1.0}), GATHER, REDUCE, g=4.0, r=4.0) == [(0, 4), (0, 4)]


def test_collectives_of_one_communicator_never_share():
    again = GATHER | {"lane": Lane.REDUCE_SCATTER, "unit": "h"}
    assert spans(Contention(nic_share=1.0), GATHER, again, g=4.0, h=4.0) == [(0, 4), (4, 8)]


def test_a_slowdown_may_depend_on_what_is_slowed_and_by_what():
    by_op = Contention(compute_slowdown_by_collective={Op.FWD: 2.0})
    assert spans(by_op, COMPUTE, GATHER, c=2.0, g=9.0)[0] == (0, 4)
    assert spans(by_op, COMPUTE | {"op": Op.BWD}, GATHER, c=2.0, g=9.0)[0] == (0, 2)
    pair = Contention(compute_slowdown_by_collective=lambda i, by: 3.0 if (i.unit, by.unit) == ("c", "g") else 1.0)
    assert spans(pair, COMPUTE, GATHER, c=2.0, g=9.0)[0] == (0, 6)
    assert spans(pair, COMPUTE, REDUCE, c=2.0, r=9.0)[0] == (0, 2)


def test_a_slower_start_delays_what_waits_for_it():
    slow = Contention(compute_slowdown_by_collective=1.5)
    program = build(layers_only(3), Plan(), 8)
    assert run(program, durations()).step_time_s() == 245
    # AG(1) and AG(2) beside FWD(0), then each collective beside a backward: 10 s at 2/3 of the rate, 5 more each time
    forward = 10 / 1.5 + 10 / 1.5  # what FWD(0) has done when both gathers are through
    played = run(program, durations(), contention=slow)
    first = next(k for k, i in enumerate(program.ops) if i.op is Op.FWD)
    assert played.columns.end_s[first] == pytest.approx(10 + 20 + (25 - forward))
    assert played.step_time_s() > 245


def test_a_collective_over_ranks_goes_at_the_pace_of_the_slowest():
    """Rank 1 computes beside the collective, rank 0 does not: both end late."""
    program = by_hand(COMPUTE, GATHER | {"group_size": 2}, world_size=2)
    seconds = {(Op.FWD, "c"): [0.0, 4.0], (Op.ALL_GATHER, "g"): 10.0}
    played = run(program, seconds, ranks=2, contention=Contention(collective_slowdown_by_compute=2.0))
    assert np.asarray(played.columns.end_s[1]).tolist() == [12.0, 12.0]


@pytest.mark.parametrize(("slowdown", "end", "late"), [(1.0, 8.5, {2: 8.0}), (100.0, 54.5, {})])
def test_an_operation_that_the_cpu_is_slow_to_issue_may_end_later_still(slowdown, end, late):
    """4 s, issued from 0 to 8 as 8 kernels: it cannot end before 8.5. At 2, when 3 s are left, a collective starts."""
    program = by_hand(GATHER | {"unit": "h"}, GATHER, COMPUTE)
    seconds = {(Op.ALL_GATHER, "h"): 2.0, (Op.ALL_GATHER, "g"): 50.0, (Op.FWD, "c"): 4.0}
    contention = Contention(lambda i, by: slowdown if by.unit == "g" else 1.0)
    issue = {"issue_s": lambda i: 0.0 if i.communicator else 8.0, "launch_s": 1.0}
    for some in (seconds, {key: [value] * 2 for key, value in seconds.items()}):  # one rank, and two that are alike
        played = run(replace(program, world_size=2), some, contention=contention, **issue)
        assert played.of_rank(played.columns.end_s, 0)[-1] == pytest.approx(end)
        assert {k: np.ravel(at)[0] for k, at in played.columns.late.items()} == late


def test_a_stream_that_is_told_to_wait_again_and_again_waits_for_the_last_of_each_stream():
    wait = {"kind": Kind.WAIT_STREAM, "lane": Lane.ALL_REDUCE}
    waits = [wait | {"other": other} for other in (Lane.COMPUTE, Lane.ALL_GATHER)]
    for times in range(1, 12):
        *_, last = spans(Contention(), *([COMPUTE, GATHER, *waits] * times), REDUCE, c=1.0, g=2.0, r=5.0)
        assert last == (2 * times, 2 * times + 5)


def test_a_function_that_does_not_look_at_units_is_asked_less_often():
    program = build(layers_only(6), Plan(), 8)
    asked = []

    def slower(i, by):
        asked.append((i.op, by.op))
        return 1.5 if i.op is Op.BWD else 1.25

    by_unit = run(program, durations(), contention=Contention(slower))
    often, seldom = len(asked), len(set(asked))
    slower.per_unit = False
    asked.clear()
    alike = run(program, durations(), contention=Contention(slower))
    assert columns(alike) == columns(by_unit)
    assert len(asked) == seldom < often


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute_slowdown_by_collective": 0.5}, "compute_slowdown_by_collective is 0.5; it must be a number >= 1"),
        ({"collective_slowdown_by_compute": {Op.ALL_GATHER: -1}}, "collective_slowdown_by_compute is -1"),
        ({"nic_share": 2.0}, "nic_share is 2.0; it must be a number from 0 to 1"),
    ],
)
def test_wrong_factors_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        Contention(**fields)


@pytest.mark.parametrize("factor", [0.0, math.inf])
def test_a_wrong_factor_of_a_function_is_named_with_its_operations(factor):
    program = by_hand(COMPUTE, GATHER)
    seconds = {(Op.FWD, "c"): 1.0, (Op.ALL_GATHER, "g"): 1.0}
    with pytest.raises(
        ValueError, match=rf"the slowdown of FWD c beside ALL_GATHER\(g\).* is {factor}; it must be a number >= 1"
    ):
        run(program, seconds, contention=Contention(compute_slowdown_by_collective=lambda i, by: factor))


# -- on any program


def columns(played):
    c = played.columns
    return [np.array([np.broadcast_to(x, played.ranks) for x in column]).tolist() for column in
            (c.issue_s, c.clock_s, c.start_s, c.end_s)]  # fmt: skip


@given(anything, devices, issuing(), st.sampled_from([1.0, 0.1, 1 / 3]))
def test_factors_of_1_change_nothing_to_the_last_digit(case, device, issue, unit_s):
    program, seconds, ranks = case
    issue_s, launch_s = issue
    seconds = {key: [s * unit_s for s in of_rank] for key, of_rank in seconds.items()}
    how = {"device": device, "ranks": ranks, "issue_s": issue_s, "launch_s": launch_s}
    plain, contended = run(program, seconds, **how), run(program, seconds, contention=Contention(), **how)
    assert columns(plain) == columns(contended)


def by_units(i, by):
    return 1 + len(i.unit) / 8 + len(by.unit) / 16


@given(
    anything,
    devices,
    issuing(),
    st.builds(
        Contention,
        st.sampled_from([1.1, {Op.FWD: 2.0}, by_units]),
        st.sampled_from([1.0, 1.3, by_units]),
        st.sampled_from([0.0, 0.7, {"shard": 1.0, "one": 0.5}]),
    ),
)
def test_one_rank_is_played_as_each_of_several_that_are_alike(case, device, issue, contention):
    """Two loops share nothing but the rates: the one for a rank that stands for all, and the one for several ranks."""
    program, seconds, ranks = case
    assume(ranks > 1 and seconds)
    how = {"device": device, "issue_s": issue[0], "launch_s": issue[1], "contention": contention}
    alone = run(program, {key: float(of_rank[0]) for key, of_rank in seconds.items()}, **how)
    alike = run(program, {key: [of_rank[0]] * ranks for key, of_rank in seconds.items()}, **how)
    assert alike.ranks == ranks
    for rank in range(ranks):
        for one, several in zip(columns(alone), columns(alike), strict=True):
            assert [of_rank[rank] for of_rank in several] == pytest.approx([here for (here,) in one], rel=1e-12)
    assert alone.columns.blocks.keys() == alike.columns.blocks.keys()
    for number, waited in alone.columns.blocks.items():
        assert np.allclose(np.array(alike.columns.blocks[number]).T, waited, rtol=1e-12, atol=0)
    assert alone.columns.late.keys() == alike.columns.late.keys()


@given(anything, devices, issuing(), st.tuples(*[st.sampled_from([1.0, 1.1, 2.0])] * 2), st.sampled_from([0.0, 0.7, 1]))
def test_no_operation_is_faster_than_alone_or_starts_before_it_may(case, device, issue, slowdowns, share):
    program, seconds, ranks = case
    issue_s, launch_s = issue
    how = {"device": device, "ranks": ranks, "issue_s": issue_s, "launch_s": launch_s}
    played = run(program, seconds, contention=Contention(*slowdowns, share), **how)
    waits = played.timeline().select(rank=0).ops
    ends = {e.seq: e.end_s for e in waits}
    for e in waits:
        assert e.duration_s >= np.min(seconds[e.op, e.unit]) - 1e-9
        assert all(e.start_s >= ends[seq] for seq in e.waits_on)


@given(anything, devices, issuing(), st.tuples(*[st.sampled_from([1.0, 1.1, 2.0])] * 2))
def test_where_everything_takes_twice_as_long_so_does_every_step(case, device, issue, slowdowns):
    program, seconds, ranks = case
    issue_s, launch_s = issue
    how = {"device": device, "ranks": ranks, "issue_s": issue_s, "launch_s": launch_s}
    at_once = {key: [0.0] * ranks if key[0] in COPIES else of_rank for key, of_rank in seconds.items()}
    played = run(program, at_once, contention=Contention(*slowdowns), **how)
    twice = played.scaled(compute=2.0, network=2.0, cpu=2.0)
    assert twice.span_s == pytest.approx(2 * played.span_s, rel=1e-12)
