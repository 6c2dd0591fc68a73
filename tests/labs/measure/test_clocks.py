"""Ranks on one clock: what they did together says how their clocks differ, and when a collective was on the wire."""

from __future__ import annotations

import msgspec
import pytest

from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from labs.measure.clocks import meetings, merged, offsets, on_the_wire

MS = 1e-3


def collective(rank, seq, start_ms, end_ms, *, op=Op.ALL_GATHER, unit="layers.0", group_size=2):
    return Event(
        seq=seq, rank=rank, op=op, lane=Lane.ALL_GATHER, unit=unit, group_size=group_size,
        issue_s=start_ms * MS, start_s=start_ms * MS, end_s=end_ms * MS,
    )  # fmt: skip


def timeline(*events, world_size=2):
    return Timeline(Header(producer="test", clock="measured", world_size=world_size), events)


def shifted(events, by_s):
    return [
        msgspec.structs.replace(e, issue_s=e.issue_s + by_s, start_s=e.start_s + by_s, end_s=e.end_s + by_s)
        for e in events
    ]


RANK_0 = [collective(0, 0, 10, 20), collective(0, 1, 31, 32, op=Op.REDUCE_SCATTER)]
RANK_1 = [collective(1, 0, 18, 21), collective(1, 1, 30, 33, op=Op.REDUCE_SCATTER)]


def test_ranks_meet_in_the_same_occurrence_of_the_same_collective():
    twice = [*RANK_0, collective(0, 2, 40, 41)], [*RANK_1, collective(1, 2, 40, 41)]
    met = meetings(timeline(*twice[0], *twice[1]))
    assert [[(e.rank, e.seq) for e in events] for events in met] == [[(0, i), (1, i)] for i in (0, 1, 2)]


def test_shards_and_replicas_meet_apart():
    """Four ranks, shards of two: 0 and 1 gather, 2 and 3 gather; 0 and 2 reduce, 1 and 3 reduce."""
    events = [collective(rank, 0, 0, 9) for rank in range(4)]
    events += [collective(rank, 1, 10, 19, op=Op.ALL_REDUCE) for rank in range(4)]
    met = meetings(timeline(*events, world_size=4))
    assert sorted([e.rank for e in events] for events in met) == [[0, 1], [0, 2], [1, 3], [2, 3]]
    assert set(offsets(timeline(*events, world_size=4))) == {0, 1, 2, 3}


def test_one_clock_for_all_stays_as_it_is():
    found = offsets(timeline(*RANK_0, *RANK_1))
    assert [offset.seconds for offset in found.values()] == [0.0, 0.0]
    # Rank 0 left at 32 what rank 1 entered at 30, rank 1 at 33 what rank 0 entered at 31
    assert found[1].uncertain_s == pytest.approx(2 * MS)


@pytest.mark.parametrize("behind_s", [-1e6, 0.5, 3600.0])
def test_a_clock_of_its_own_is_found_as_exactly_as_is_said(behind_s):
    found = offsets(timeline(*RANK_0, *shifted(RANK_1, -behind_s)))[1]
    assert abs(found.seconds - behind_s) <= found.uncertain_s + 1e-9
    assert found.uncertain_s == pytest.approx(2 * MS, rel=1e-3)


def test_merged_ranks_begin_at_zero_and_keep_their_durations():
    together, uncertain_s = merged([timeline(*RANK_0), timeline(*shifted(RANK_1, 77.0))])
    assert min(e.issue_s for e in together) == 0.0
    assert together.ranks == (0, 1)
    assert [e.duration_s for e in together] == pytest.approx([e.duration_s for e in (*RANK_0, *RANK_1)])
    met = [max(e.start_s for e in events) - min(e.end_s for e in events) for events in meetings(together)]
    assert max(met) <= 1e-9  # nobody has left before all had entered
    assert 0 < uncertain_s < 3 * MS


def test_clocks_of_different_speeds_are_refused():
    fast = [collective(1, 0, 18, 21), collective(1, 1, 130, 133, op=Op.REDUCE_SCATTER)]
    with pytest.raises(ValueError, match="drifted apart"):
        offsets(timeline(*RANK_0, *fast))


def test_ranks_that_share_no_collective_are_named():
    with pytest.raises(ValueError, match=r"ranks \[1\] share no collective with rank 0"):
        offsets(timeline(*RANK_0, collective(1, 0, 18, 21, unit="layers.7")))


def test_on_the_wire_is_what_follows_the_last_rank():
    recorded = timeline(*RANK_0, *RANK_1)
    wired = on_the_wire(recorded)
    assert [e.start_s / MS for e in wired] == pytest.approx([18, 31, 18, 31])
    assert [e.end_s / MS for e in wired] == pytest.approx([20, 32, 21, 33])
    assert exposed_comm_s(recorded, 0) == pytest.approx(11 * MS)
    assert exposed_comm_s(wired, 0) == pytest.approx(3 * MS)
    assert [e.seq for e in wired] == [e.seq for e in recorded]
