"""`Peers`: how long a rank waited in a collective for the last of its group, and which rank that was."""

import pytest
from msgspec import structs

from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.timeline import Lane, Op, Timeline
from tests.timeline.strategies import gather, op, timeline_of


def measured(*events) -> Peers:
    timeline = timeline_of(*events)
    header = structs.replace(timeline.header, clock="measured", device="gpu")
    return Peers(Timeline(header, timeline.events))


def of_rank(peers: Peers, rank: int, kind: Op = Op.ALL_GATHER):
    return next(e for e in peers.view(rank).ops if e.op is kind)


def meeting(starts: list[float], end_s: float, group_size: int, **fields):
    """A collective that each rank enters when it has computed, and all leave together."""
    for rank, start_s in enumerate(starts):
        yield op(0.0, start_s, rank=rank, seq=0, issue_s=0.0)
        yield gather(start_s, end_s, rank=rank, seq=1, group_size=group_size, unit="a", **fields)


def test_who_comes_early_waits_for_who_comes_last():
    peers = measured(*meeting([1.0, 4.0, 2.0], 5.0, 3))

    late = [peers.lateness(of_rank(peers, rank)) for rank in range(3)]
    assert [one.seconds for one in late] == [3.0, 0.0, 2.0]
    assert {one.event.rank for one in late if one.seconds} == {1}


def test_ranks_of_another_group_do_not_count():
    peers = measured(*meeting([1.0, 2.0, 8.0, 1.0], 9.0, 2))

    assert peers.lateness(of_rank(peers, 0)).seconds == 1.0
    assert peers.lateness(of_rank(peers, 3)).event.rank == 2


def test_an_all_reduce_between_replicas_meets_ranks_at_equal_places():
    """Four ranks as two replicas of two shards: 0 reduces with 2, 1 with 3."""
    kind = {"op": Op.ALL_REDUCE, "lane": Lane.ALL_REDUCE}
    made = [structs.replace(e, **kind) if e.op is Op.ALL_GATHER else e for e in meeting([1.0, 8.0, 3.0, 1.0], 9.0, 2)]
    peers = measured(*made)

    assert peers.lateness(of_rank(peers, 0, Op.ALL_REDUCE)).seconds == 2.0
    assert peers.lateness(of_rank(peers, 3, Op.ALL_REDUCE)).event.rank == 1


def test_the_second_gather_of_a_unit_meets_the_second():
    early = [gather(0.0, 1.0, seq=0), gather(5.0, 9.0, seq=1)]
    late = [gather(0.0, 1.0, seq=0, rank=1), gather(8.0, 9.0, seq=1, rank=1)]
    peers = measured(*(structs.replace(e, group_size=2) for e in (*early, *late)))

    assert [peers.lateness(e).seconds for e in peers.view(0).ops] == [0.0, 3.0]


def test_one_rank_alone_has_nobody_to_be_compared_with():
    peers = measured(op(0.0, 1.0, seq=0), gather(2.0, 9.0, seq=1, group_size=8))

    assert peers.lateness(of_rank(peers, 0)) == (0.0, None)


def test_a_simulated_rank_says_by_itself_that_it_was_ready_earlier():
    peers = Peers(timeline_of(gather(3.0, 4.0, group_size=8, issue_s=1.0)))

    assert peers.lateness(of_rank(peers, 0)) == (pytest.approx(2.0), None)
