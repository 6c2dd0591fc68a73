"""Intervals against a brute-force raster; step times, exposure, overlap and durations of pieces on small timelines."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.diagnose import diagnose
from fsdp_sim.timeline import Event, Lane, Op, Timeline, compare
from fsdp_sim.timeline.analysis import (
    busy_s,
    exposed_comm_s,
    exposed_intervals,
    median_step,
    overlap,
    piece_durations,
    step_time_s,
    subtract,
    total_s,
    union,
)
from fsdp_sim.viz.steps.bands import bands_of
from fsdp_sim.viz.steps.summary import summary_table
from fsdp_sim.words import human_ms
from tests.timeline.strategies import gather, op, timeline_of

CELLS = 24
Intervals = list[tuple[float, float]]
intervals = st.lists(st.tuples(st.integers(0, CELLS), st.integers(0, CELLS)).map(lambda ends: tuple(sorted(ends))))


def raster(found: Intervals) -> np.ndarray:
    """Which cells [k, k+1) are covered."""
    covered = np.zeros(CELLS, dtype=bool)
    for start, end in found:
        covered[int(start) : int(end)] = True
    return covered


def assert_disjoint_and_ascending(found: Intervals) -> None:
    assert all(start < end for start, end in found)
    assert all(a[1] <= b[0] for a, b in pairwise(found))


# ---------------------------------------------------------------------- intervals


@given(intervals)
def test_a_union_covers_the_same_cells_with_gaps_between(one: Intervals) -> None:
    merged = union(one)
    assert_disjoint_and_ascending(merged)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    assert (raster(merged) == raster(one)).all()
    assert total_s(merged) == raster(one).sum()


@given(intervals, intervals)
def test_a_difference_covers_the_cells_of_one_and_not_the_other(one: Intervals, holes: Intervals) -> None:
    rest = subtract(one, holes)
    assert_disjoint_and_ascending(rest)
    assert (raster(rest) == (raster(one) & ~raster(holes))).all()
    assert total_s(rest) == (raster(one) & ~raster(holes)).sum()


# ---------------------------------------------------------------------- exposure and overlap

KINDS = {  # (op, lane) -> whether it communicates, whether it computes
    (Op.ALL_GATHER, Lane.ALL_GATHER): (True, False),
    (Op.REDUCE_SCATTER, Lane.REDUCE_SCATTER): (True, False),
    (Op.REDUCE_SCATTER, Lane.POST_BACKWARD): (True, False),
    (Op.ALL_GATHER, Lane.UNSHARD): (True, False),
    (Op.ALL_GATHER, Lane.COMPUTE): (True, False),  # waited for by the computing thread
    (Op.OTHER, Lane.OTHER_COMM): (True, False),
    (Op.FWD, Lane.COMPUTE): (False, True),
    (Op.AG_COPY_OUT, Lane.COMPUTE): (False, True),
    (Op.AG_COPY_IN, Lane.AG_COPY_IN): (False, False),
    (Op.AG_CAST, Lane.PRE_UNSHARD): (False, False),
    (Op.DIV, Lane.POST_BACKWARD): (False, False),
    (Op.GRAD_CAST, Lane.REDUCE_SCATTER): (False, False),
}
comm_and_compute = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(0, CELLS), st.integers(0, CELLS)),
)


@given(comm_and_compute)
def test_exposed_is_communication_where_nothing_computes(rows: list[tuple[tuple[Op, Lane], int, int]]) -> None:
    spans = [(kind, *sorted(ends)) for kind, *ends in rows]
    timeline = timeline_of(*(op(start, end, kind[0], kind[1]) for kind, start, end in spans))
    comm = raster([(a, b) for kind, a, b in spans if KINDS[kind][0]])
    compute = raster([(a, b) for kind, a, b in spans if KINDS[kind][1]])
    assert (raster(exposed_intervals(timeline, 0)) == (comm & ~compute)).all()
    assert exposed_comm_s(timeline, 0) == (comm & ~compute).sum()
    assert overlap(timeline, 0) == pytest.approx((comm & compute).sum() / comm.sum() if comm.any() else 0.0)


def test_exposure_is_of_one_rank() -> None:
    timeline = timeline_of(gather(0, 4), op(1, 3), op(0, 4, rank=1))
    assert (exposed_intervals(timeline, 0), exposed_comm_s(timeline, 1)) == ([(0, 1), (3, 4)], 0.0)
    assert (overlap(timeline, 0), overlap(timeline, 1)) == (0.5, 0.0)


def test_memory_events_are_no_communication_and_no_compute() -> None:
    timeline = timeline_of(gather(0, 4), op(1, 3, Op.ALLOC), op(0, 4, Op.FREE, Lane.REDUCE_SCATTER))
    assert exposed_comm_s(timeline, 0) == 4


# ---------------------------------------------------------------------- steps


def steps_of(*durations: float) -> Timeline:
    ops = (op(10.0 * step, 10.0 * step + s, step=step) for step, s in enumerate(durations))
    return timeline_of(*ops, clock="measured")


def test_a_measured_step_lasts_from_the_first_start_to_the_last_end_on_any_rank() -> None:
    timeline = timeline_of(op(1, 2, step=3), op(1.5, 4, step=3, rank=1), op(5, 9, step=4), clock="measured")
    assert [step_time_s(timeline, step) for step in (3, 4)] == [3, 4]


def test_a_simulated_step_begins_when_the_one_before_ends_and_the_first_at_0() -> None:
    timeline = timeline_of(op(1, 2), op(1.5, 4, rank=1), op(5, 9, step=1), op(11, 12, step=3))
    assert [step_time_s(timeline, step) for step in (0, 1, 3)] == [4, 5, 1]


def test_a_step_without_operations_is_named_with_those_that_have_some() -> None:
    with pytest.raises(ValueError, match=r"step 2 has no operations; the steps that have some are \[0, 1\]"):
        step_time_s(timeline_of(op(0, 1), op(1, 2, step=1), op(3, 3, Op.FREE, step=2)), 2)


def test_the_median_step_leaves_out_the_first_unless_there_is_no_other() -> None:
    assert median_step(steps_of(9.0, 3.0, 1.0, 2.0)) == 3
    assert median_step(steps_of(1.0, 2.0, 3.0), skip=0) == 1
    assert median_step(steps_of(9.0)) == 0


def test_a_step_of_nothing_but_frees_is_never_the_median() -> None:
    assert median_step(timeline_of(op(0, 1), op(1, 3, step=1), op(4, 4, Op.FREE, step=2))) == 1


def test_a_timeline_without_operations_has_no_median_step() -> None:
    with pytest.raises(ValueError, match="has no operations, so no typical step"):
        median_step(timeline_of(op(0, 0, Op.ALLOC)))


@given(st.lists(st.integers(1, 9), min_size=2, max_size=8))
def test_as_many_steps_are_shorter_as_are_longer_than_the_median(durations: list[int]) -> None:
    timeline = steps_of(*durations)
    warm = sorted(durations[1:])
    assert step_time_s(timeline, median_step(timeline)) == warm[len(warm) // 2]


# ---------------------------------------------------------------------- pieces


def piece(timeline: Timeline, kind: Op, unit: str = "") -> list[float]:
    return piece_durations(timeline, 0)[kind, unit].tolist()


def test_a_collective_counts_from_its_start_and_compute_from_the_end_of_what_came_before() -> None:
    timeline = timeline_of(op(0, 1, unit="a"), gather(2, 5, unit="b"), op(7, 8, unit="b"))
    assert piece(timeline, Op.FWD, "a") == [1]  # nothing before it
    assert piece(timeline, Op.ALL_GATHER, "b") == [3]
    assert piece(timeline, Op.FWD, "b") == [3]  # the two seconds after the gather are the host's, on its account


def test_compute_that_began_before_the_last_end_counts_from_its_own_start() -> None:
    assert piece(timeline_of(gather(0, 5), op(4, 6, unit="b")), Op.FWD, "b") == [2]


def test_an_operation_that_occurs_twice_counts_with_its_mean() -> None:
    assert piece(timeline_of(gather(0, 1, unit="a"), gather(1, 4, unit="a")), Op.ALL_GATHER, "a") == [2]


def test_durations_are_in_the_order_of_the_ranks_and_zero_where_a_rank_has_none() -> None:
    timeline = timeline_of(op(0, 1, unit="a"), op(0, 3, unit="a", rank=2), op(3, 4, Op.OPTIM, rank=2))
    assert piece(timeline, Op.FWD, "a") == [1, 3]
    assert piece(timeline, Op.OPTIM) == [0, 1]


def test_only_the_step_asked_for_counts() -> None:
    timeline = timeline_of(op(0, 5, unit="a"), op(10, 11, unit="a", step=1), op(11, 12, Op.ALLOC, step=1))
    assert {key: value.tolist() for key, value in piece_durations(timeline, 1).items()} == {(Op.FWD, "a"): [1.0]}


def test_work_beside_collectives_on_their_lane_counts_from_the_end_of_what_came_before() -> None:
    timeline = timeline_of(gather(0, 2, unit="a"), op(3, 4, Op.DIV, Lane.POST_BACKWARD, unit="a"))
    assert piece(timeline, Op.DIV, "a") == [2]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1))
def test_pieces_that_follow_each_other_account_for_all_of_the_step(gaps_and_durations: list[tuple[int, int]]) -> None:
    found: list[Event] = []
    now = 0
    for number, (gap, duration) in enumerate(gaps_and_durations):
        start = now + (gap if number else 0)
        found.append(op(start, start + duration, unit=str(number)))
        now = start + duration
    pieces = piece_durations(timeline_of(*found), 0)
    assert sum(value.item() for value in pieces.values()) == now


def test_time_without_a_kernel_is_busy_for_no_reader_and_idle_for_those_that_count_it() -> None:
    """A forward of 6 s in which no kernel ran for 2, beside a gather: each table and sentence says 4 + 3 s."""
    paused = msgspec.structs.replace(op(2.0, 8.0, seq=1, unit="a"), unlaunched_s=2.0)
    timeline = timeline_of(gather(0.0, 2.0, unit="a"), paused, op(8.0, 11.0, Op.BWD, seq=2, unit="a"))

    found = diagnose(timeline)
    side = compare(timeline, timeline).a
    (row,) = summary_table(timeline).rows

    assert busy_s(timeline.ops[1:]) == found.compute_s == side.compute_s == 7.0
    assert row[4] == human_ms(7.0)
    assert found.idle_s == side.idle_s == 2.0
    assert sum(unit.compute_s for unit in side.units.values()) == 7.0
    assert bands_of(timeline, 0).computing_s.tolist() == [7.0]
