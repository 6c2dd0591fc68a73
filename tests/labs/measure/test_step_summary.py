"""A run in one line: exposed communication apart from waiting for others, and where the prediction was left."""

from __future__ import annotations

import dataclasses

import pytest

from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
from labs.measure.step_summary import StepSummary, first_divergence, summarize

MS = 1e-3


def event(rank, seq, op, unit, start_ms, end_ms, step=0):
    lane = {Op.ALL_GATHER: Lane.ALL_GATHER, Op.ALL_REDUCE: Lane.ALL_REDUCE}.get(op, Lane.COMPUTE)
    return Event(
        seq=seq, rank=rank, op=op, lane=lane, unit=unit, step=step, issue_s=start_ms * MS, start_s=start_ms * MS,
        end_s=end_ms * MS, group_size=2 if lane is not Lane.COMPUTE else 1,
    )  # fmt: skip


def timeline(*events, clock="measured"):
    return Timeline(Header(producer="test", clock=clock, world_size=2), events)


def rank(number, *, computes_until_ms, enters_ms, step=0):
    """Computes something of its own, gathers until 20 ms, hiding 2 ms of that, computes, idles for 2 ms."""
    of_block = "layers.0"
    return [
        event(number, 0, Op.OTHER, "", 0, computes_until_ms, step),
        event(number, 1, Op.ALL_GATHER, of_block, enters_ms, 20, step),
        event(number, 2, Op.OTHER, "", 18, 20, step),
        event(number, 3, Op.FWD, of_block, 20, 30, step),
        event(number, 4, Op.OPTIM, "", 32, 33, step),
    ]


EARLY, LATE = rank(0, computes_until_ms=4, enters_ms=4), rank(1, computes_until_ms=14, enters_ms=14)


def test_waiting_for_a_late_rank_is_no_exposed_communication():
    """Rank 0 is in it from 4 to 20, rank 1 from 14 on: on the wire 14 to 20, of which 18 to 20 is hidden."""
    found = summarize(timeline(*EARLY, *LATE))
    assert found.step_s == pytest.approx(33 * MS)
    assert found.exposed_s == pytest.approx(4 * MS)
    assert found.waited_s == pytest.approx((10 + 0) / 2 * MS)
    assert found.overlap == pytest.approx(2 / 6)
    assert found.idle_s == pytest.approx(2 * MS)
    assert found.collectives == 1


def test_computing_exposed_waited_and_idle_are_the_step():
    found = summarize(timeline(*EARLY, *LATE))
    computing_s = (17 + 27) / 2 * MS
    assert found.exposed_s + found.waited_s + found.idle_s + computing_s == pytest.approx(found.step_s)


def test_of_several_steps_the_first_is_left_out_and_the_median_counts():
    def shifted(events, step, late_ms):
        by_ms = 100 * step
        return [event(e.rank, 10 * step + e.seq, e.op, e.unit, e.start_s / MS + by_ms + (late_ms if e.seq else 0),
                      e.end_s / MS + by_ms + late_ms, step) for e in events]  # fmt: skip

    steps = [e for step, late in enumerate((50, 0, 3, 7)) for one in (EARLY, LATE) for e in shifted(one, step, late)]
    assert summarize(timeline(*steps)).step_s == pytest.approx(36 * MS)


def test_nothing_recorded_is_refused():
    with pytest.raises(ValueError, match="nothing to sum up"):
        summarize(timeline())


class TestDivergence:
    ORDER = (
        (Op.ALL_GATHER, "root"), (Op.FWD, "root"), (Op.ALL_GATHER, "layers.0"), (Op.FWD, "layers.0"),
        (Op.ALL_GATHER, "layers.1"), (Op.FWD, "layers.1"),
    )  # fmt: skip

    def program(self, *order, clock="measured"):
        return timeline(*(event(0, i, op, unit, i, i + 1) for i, (op, unit) in enumerate(order)), clock=clock)

    def test_names_of_the_roots_parts_and_the_loops_own_collectives_do_not_count(self):
        predicted = self.program((Op.ALL_GATHER, "root"), (Op.FWD, "embed"), *self.ORDER[2:], (Op.FWD, "head"))
        measured = self.program(*self.ORDER, (Op.FWD, "loss"), (Op.ALL_REDUCE, ""))
        assert first_divergence(predicted, measured) is None

    def test_a_gather_that_came_early_is_found(self):
        gather = (Op.ALL_GATHER, "layers.1")
        early = [*self.ORDER[:3], gather, self.ORDER[3], self.ORDER[5]]
        found = first_divergence(self.program(*self.ORDER), self.program(*early))
        assert (found.place, found.why) == (2, "order")
        assert (found.a.label, found.b.label) == ("FWD layers.0", "ALL_GATHER(layers.1)")

    def test_a_gather_that_never_came_is_found(self):
        found = first_divergence(self.program(*self.ORDER), self.program(*self.ORDER[:4], self.ORDER[5]))
        assert found.why == "only in a"
        assert found.a.label == "ALL_GATHER(layers.1)"


class TestLine:
    SUMMARY = StepSummary(
        step_s=0.2, exposed_s=0.0243, waited_s=0.031, overlap=0.124, idle_s=0.0051, collectives=17
    )  # fmt: skip
    TEXT = "step 200 ms: communication exposed 24.3 ms, overlap 12%, waiting for late ranks 31.0 ms, idle 5.10 ms"

    def test_without_a_prediction(self):
        assert self.SUMMARY.line() == self.TEXT

    def test_with_one_that_was_right(self):
        assert dataclasses.replace(self.SUMMARY, compared=True).line() == f"{self.TEXT}; issued as predicted"

    def test_with_one_that_was_not(self):
        longer = TestDivergence().program(*TestDivergence.ORDER)
        found = first_divergence(longer, TestDivergence().program(*TestDivergence.ORDER[:4]))
        line = dataclasses.replace(self.SUMMARY, compared=True, divergence=found).line()
        assert line == (
            f"{self.TEXT}; parts from the prediction at operation 3: ALL_GATHER(layers.1) was predicted, the end ran"
        )
