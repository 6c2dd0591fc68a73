"""Two timelines beside each other: the same is the same, and what differs is found where it is."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.timeline import Header, Lane, Op, Timeline
from fsdp_sim.timeline.analysis import exposed_comm_s
from fsdp_sim.timeline.comparison import compare
from tests.timeline.strategies import gather, op, timeline_of, timelines


def simulated(**plan: object) -> Timeline:
    return simulate("gpt2-124m", Cluster("A100", gpus=16), Plan(seq_len=512, **plan)).timeline


def shifted(timeline: Timeline, by_s: float) -> Timeline:
    """The same run by another clock, in another process, and another step."""
    moved = (
        msgspec.structs.replace(
            e,
            issue_s=e.issue_s + by_s,
            start_s=e.start_s + by_s,
            end_s=e.end_s + by_s,
            step=e.step + 1,
            source="x.py:1",
        )
        for e in timeline
    )
    return Timeline(Header(producer="another", clock="measured", world_size=1), moved)


# ---------------------------------------------------------------------- the same


@given(timelines().filter(lambda t: t.ops))
def test_a_timeline_compares_as_identical_with_itself(timeline: Timeline) -> None:
    found = compare(timeline, timeline)
    assert found.identical
    assert (found.divergence, found.parted, found.step_difference_s) == (None, None, 0.0)
    assert len(found.pairs) == len(found.a.ops)
    assert all(pair.a is pair.b for pair in found.pairs)
    assert set(found.causes) == {0.0}
    assert all(unit.lost_s == 0.0 for unit in found.units)


def test_clocks_and_the_numbers_of_steps_need_not_agree() -> None:
    timeline = simulated()
    assert compare(timeline, shifted(timeline, 1e4)).identical


# ---------------------------------------------------------------------- the account


@pytest.mark.parametrize(
    "other",
    [
        {"forward_prefetch": 2},
        {"activation_checkpointing": "full"},
        {"api": "ddp"},
        {"grad_accum": 2},
    ],
)
def test_causes_and_units_account_for_the_whole_difference_of_the_steps(other: dict[str, object]) -> None:
    found = compare(simulated(), simulated(**other))
    causes = found.causes
    assert causes.compute_s + causes.comm_s - causes.hidden_s + causes.idle_s == pytest.approx(found.step_difference_s)
    assert sum(u.lost_s for u in found.units) + causes.idle_s == pytest.approx(found.step_difference_s)
    for side in (found.a, found.b):
        assert sum(u.exposed_s for u in side.units.values()) == pytest.approx(side.exposed_s)
        assert side.exposed_s == pytest.approx(exposed_comm_s(side.timeline, side.rank))
    assert len(found.pairs) + len(found.only_a) == len(found.a.ops)
    assert len(found.pairs) + len(found.only_b) == len(found.b.ops)


def test_longer_compute_and_newly_hidden_communication_are_told_apart() -> None:
    a = timeline_of(gather(0, 2, unit="x"), op(2, 5, unit="x"))
    b = timeline_of(gather(0, 2, unit="x"), op(0, 4, unit="x"))
    causes = compare(a, b).causes
    assert tuple(causes) == (1.0, 0.0, 2.0, 0.0)
    assert causes.exposed_s == -2.0


def test_of_two_collectives_in_flight_the_first_is_exposed() -> None:
    both = timeline_of(gather(0, 3, unit="x"), gather(2, 5, unit="y"), op(4, 6, unit="x"))
    units = compare(both, both).a.units
    assert (units["x"].exposed_s, units["y"].exposed_s) == (3.0, 1.0)
    assert units["y"].comm_s == 3.0


# ---------------------------------------------------------------------- order


def test_the_first_operation_that_one_has_alone_is_the_divergence() -> None:
    a = timeline_of(gather(0, 1, unit="x"), op(1, 2, unit="x"), op(2, 3, unit="y"))
    b = timeline_of(gather(0, 1, unit="x"), op(1, 2, unit="x"), gather(1, 2, unit="y"), op(2, 3, unit="y"))
    found = compare(a, b).divergence
    assert found is not None
    assert (found.place, found.why, found.a.label, found.b.label) == (2, "only in b", "FWD y", "ALL_GATHER(y)")
    turned = compare(b, a).divergence
    assert turned is not None
    assert (turned.place, turned.why) == (2, "only in a")


def test_issue_order_counts_and_not_the_order_in_which_lanes_run() -> None:
    issued = [op(0, 1, unit="x", seq=1), gather(5, 6, unit="x", seq=2)]
    late = timeline_of(*issued)
    early = timeline_of(issued[0], gather(0, 1, unit="x", seq=2))
    assert compare(late, early).divergence is None
    swapped = timeline_of(op(0, 1, unit="x", seq=2), gather(5, 6, unit="x", seq=1))
    found = compare(late, swapped).divergence
    assert found is not None
    assert (found.place, found.why) == (0, "order")


def test_a_timeline_that_ends_early_diverges_where_it_ends() -> None:
    whole = timeline_of(op(0, 1, unit="x"), op(1, 2, unit="y"))
    found = compare(whole, timeline_of(op(0, 1, unit="x"))).divergence
    assert found is not None
    assert (found.place, found.a.unit, found.b, found.why) == (1, "y", None, "only in a")


def test_with_prefetch_the_orders_differ_at_the_first_early_all_gather() -> None:
    found = compare(simulated(), simulated(forward_prefetch=1)).divergence
    assert found is not None
    assert found.why == "order"
    assert (found.a.op, found.b.op) == (Op.FWD, Op.ALL_GATHER) or Op.AG_COPY_IN is found.b.op


def test_copies_that_one_way_to_train_never_makes_are_no_divergence() -> None:
    a = timeline_of(op(0, 1, Op.AG_COPY_IN, Lane.AG_COPY_IN, unit="x"), gather(1, 2, unit="x"), op(2, 3, unit="x"))
    b = timeline_of(gather(1, 2, unit="x"), op(2, 3, unit="x"))
    found = compare(a, b)
    assert found.divergence is None
    assert [e.op for e in found.only_a] == [Op.AG_COPY_IN]
    assert not found.identical


# ---------------------------------------------------------------------- times


def test_times_part_where_they_first_differ_by_more_than_the_tolerance() -> None:
    a = timeline_of(op(0, 1, unit="x"), op(1, 2, unit="y"), op(2, 3, unit="z"))
    b = timeline_of(op(0, 1.05, unit="x"), op(1.05, 3, unit="y"), op(3, 4, unit="z"))
    found = compare(a, b, tolerance_s=0.1).parted
    assert found is not None
    assert (found.a.unit, found.start_later_s, found.end_later_s) == ("y", pytest.approx(0.05), pytest.approx(1.0))
    assert compare(a, b, tolerance_s=2.0).parted is None


@given(st.floats(0.0, 0.5))
def test_times_within_the_tolerance_do_not_part(late_s: float) -> None:
    a, b = timeline_of(op(0, 1, unit="x")), timeline_of(op(0, 1 + late_s, unit="x"))
    assert compare(a, b, tolerance_s=0.5).identical


# ---------------------------------------------------------------------- ranks, steps, what cannot be


def test_a_rank_of_each_may_be_compared_whatever_the_numbers_of_ranks() -> None:
    four = timeline_of(*(op(0, 1 + rank, unit="x", seq=0, rank=rank) for rank in range(4)))
    one = timeline_of(op(0, 4, unit="x"))
    assert compare(four, one, rank=(3, 0)).identical
    slow = compare(four, four, rank=(0, 3))
    assert slow.causes.compute_s == 3.0
    assert slow.step_difference_s == 0.0
    assert slow.causes.idle_s == -3.0


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ({"rank": 5}, r"rank 5 is not in the first timeline; it has ranks \[0\]"),
        ({"rank": (0, 7)}, r"rank 7 is not in the second timeline"),
        ({"step": 3}, r"step 3 is not in the first timeline; it has steps \[0\]"),
    ],
)
def test_what_is_not_there_is_named(which: dict[str, object], words: str) -> None:
    one = timeline_of(op(0, 1, unit="x"))
    with pytest.raises(ValueError, match=words):
        compare(one, one, **which)


def test_an_empty_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="the second timeline has no operations"):
        compare(timeline_of(op(0, 1)), timeline_of())
