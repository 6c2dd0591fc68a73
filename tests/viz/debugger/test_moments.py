"""A moment is a pure function of the record: what is alive, what waits, where the others are, at any event."""

from collections import defaultdict

import numpy as np
from hypothesis import given

from fsdp_sim.timeline import Memory, Op, Phase, Timeline
from fsdp_sim.viz.debugger import moment
from fsdp_sim.viz.debugger.moments import MOST_OTHERS, events_of, match
from tests.timeline.strategies import gather, op, timeline_of, timelines


@given(timelines())
def test_what_is_alive_at_the_last_event_is_what_the_timeline_says_and_the_peak_is_its_peak(timeline: Timeline) -> None:
    for rank in timeline.ranks:
        last = moment(timeline, rank, events_of(timeline, rank)[-1].seq)
        by_category: dict[Memory, int] = defaultdict(int)
        for (category, _), n_bytes in last.live.items():
            by_category[category] += n_bytes
        expected = {c: int(values[-1]) for c, values in timeline.live_bytes(rank)[1].items()}
        assert {c: n for c, n in by_category.items() if n} == {c: n for c, n in expected.items() if n}
        assert last.peak_bytes == last.top_bytes == max(0, timeline.peak_bytes(rank))


@given(timelines())
def test_a_step_changes_what_is_alive_by_what_it_says(timeline: Timeline) -> None:
    for rank in timeline.ranks:
        before = 0
        for event in events_of(timeline, rank):
            at = moment(timeline, rank, event.seq)
            assert at.live_bytes == before + at.change
            before = at.live_bytes


@given(timelines())
def test_waiting_is_seen_from_both_ends(timeline: Timeline) -> None:
    for rank in timeline.ranks:
        at = {e.seq: moment(timeline, rank, e.seq) for e in events_of(timeline, rank)}
        for seq, here in at.items():
            assert all(here.event in at[e.seq].waited_by for e in here.waits_on)
            assert all(seq in e.waits_on for e in here.waited_by)
            if here.behind is not None:
                assert here.behind.lane is here.event.lane


def test_a_free_is_of_its_own_unit_and_category() -> None:
    def of(kind: Op, unit: str, category: Memory, n_bytes: int) -> object:
        return op(0, 0, kind, unit=unit, category=category, bytes=n_bytes)

    timeline = timeline_of(
        of(Op.ALLOC, "a", Memory.UNSHARDED, 8), of(Op.ALLOC, "b", Memory.UNSHARDED, 4),
        of(Op.ALLOC, "a", Memory.RS_INPUT, 2), of(Op.FREE, "a", Memory.UNSHARDED, 8),
    )  # fmt: skip
    assert moment(timeline, 0, 2).live == {
        (Memory.UNSHARDED, "a"): 8, (Memory.UNSHARDED, "b"): 4, (Memory.RS_INPUT, "a"): 2,
    }  # fmt: skip
    at = moment(timeline, 0, 3)
    assert at.live == {(Memory.UNSHARDED, "b"): 4, (Memory.RS_INPUT, "a"): 2}
    assert (at.change, at.live_bytes, at.peak_bytes) == (-8, 6, 14)


def test_the_seconds_of_a_collective_that_compute_hides() -> None:
    timeline = timeline_of(gather(1.0, 5.0), op(0.0, 2.0), op(4.0, 9.0))
    assert moment(timeline, 0, 0).hidden_s == 2.0
    assert moment(timeline, 0, 1).hidden_s == 0.0, "compute is not hidden by anything"


def test_what_held_an_operation_up_is_what_was_over_last() -> None:
    late = op(6.0, 7.0, unit="b", issue_s=0.5, waits_on=(0,))
    at = moment(timeline_of(gather(0.0, 4.0), op(0.0, 6.0), late), 0, 2)
    assert at.lag_s == 5.5
    assert at.behind is not None
    assert at.behind.end_s == 6.0
    assert at.held_up_by == at.behind
    prompt = moment(timeline_of(op(0.0, 1.0), op(2.0, 3.0)), 0, 1)
    assert prompt.held_up_by is None


def test_other_ranks_are_seen_at_the_time_the_event_is_issued() -> None:
    timeline = timeline_of(
        op(2.0, 3.0, seq=7), op(0.0, 1.5, rank=1, unit="over"), op(1.5, 2.5, rank=1, unit="now", seq=1),
        gather(1.0, 4.0, rank=1, seq=2), op(2.6, 9.0, rank=1, unit="later", seq=3), op(5.0, 6.0, rank=2),
    )  # fmt: skip
    second, third = moment(timeline, 0, 7).others
    assert [e.unit for e in second.running] == ["now", ""]
    assert second.issued is not None
    assert second.issued.unit == "now"
    assert (third.running, third.issued) == ((), None)


def test_of_a_thousand_ranks_the_first_are_looked_up() -> None:
    timeline = timeline_of(*(op(0.0, 1.0, rank=rank, seq=5) for rank in range(1000)))
    at = moment(timeline, 500, 5)
    assert (len(at.others), at.n_ranks, at.others[0].rank) == (MOST_OTHERS, 1000, 0)


def test_the_counterpart_is_the_one_with_as_many_of_its_kind_before_it() -> None:
    timeline = timeline_of(
        gather(0, 1), gather(1, 2, seq=1), gather(2, 3, seq=2, unit="b"),
        gather(4, 5, rank=1, unit="b"), gather(5, 6, rank=1, seq=1), gather(7, 8, rank=1, seq=2),
    )  # fmt: skip
    mine = events_of(timeline, 0)
    assert [getattr(match(timeline, e, 1), "start_s", None) for e in mine] == [5, 7, 4]


def test_backward_needs_what_the_copy_out_made_whole(run: Timeline) -> None:
    backward = run.select(rank=0, op=Op.BWD, unit="layers.2", phase=Phase.BACKWARD).events[0]
    at = moment(run, 0, backward.seq)
    assert [e.label for e in at.waits_on] == ["ag_copy_out(layers.2)"]
    assert at.live[Memory.UNSHARDED, "layers.2"] == 4 * (8 * 8 + 8)


def test_the_gpu_may_be_far_behind_the_cpu_in_a_prediction(predicted: Timeline) -> None:
    lags = [moment(predicted, 0, e.seq).lag_s for e in predicted.select(op=Op.FWD)]
    assert np.all(np.diff(lags) > 0), "the CPU runs ahead, further with every layer"
