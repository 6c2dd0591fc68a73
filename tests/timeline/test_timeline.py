"""A timeline keeps events by rank and issue order, answers questions about them, and survives a file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.timeline import Columns, Event, Header, Lane, Memory, Op, Timeline
from tests.timeline.strategies import gather, op, timeline_of, timelines

HEADER = Header(producer="tests", clock="simulated", world_size=2)


def memory(kind: Op, n_bytes: int, start_s: float, category: Memory = Memory.UNSHARDED, **fields: object) -> Event:
    return op(start_s, start_s, kind, bytes=n_bytes, category=category, **fields)


# ---------------------------------------------------------------------- order and selection


@given(timelines())
def test_events_are_sorted_by_rank_and_issue_order_whatever_order_they_come_in(timeline: Timeline) -> None:
    assert [(e.rank, e.seq) for e in timeline] == sorted((e.rank, e.seq) for e in timeline)
    assert len(timeline) == len(timeline.events)
    assert set(timeline.ranks) == {e.rank for e in timeline}
    assert set(timeline.steps) == {e.step for e in timeline}


@given(timelines())
def test_operations_are_the_events_that_are_no_alloc_or_free(timeline: Timeline) -> None:
    assert [e for e in timeline if e.op not in ("alloc", "free")] == list(timeline.ops)
    for rank in timeline.ranks:
        assert timeline.issue_order(rank) == [e.label for e in timeline.ops if e.rank == rank]


def test_labels_are_those_of_the_recorded_programs() -> None:
    forward, embed = op(0, 1, unit="layers.0"), gather(0, 1, unit="root")
    assert [e.label for e in (forward, embed, op(0, 1, Op.OPTIM))] == ["FWD layers.0", "ALL_GATHER(root)", "OPTIM"]


def test_a_lane_is_in_order_of_start_and_knows_nothing_of_other_lanes() -> None:
    timeline = timeline_of(gather(3, 4, unit="late"), gather(1, 2, unit="early"), op(0, 5), gather(1, 3, unit="second"))
    assert timeline.lane_order(0, Lane.ALL_GATHER) == ["ALL_GATHER(early)", "ALL_GATHER(second)", "ALL_GATHER(late)"]
    assert timeline.issue_order(0)[:2] == ["ALL_GATHER(late)", "ALL_GATHER(early)"]
    assert timeline.lane_order(0, Lane.ALL_REDUCE) == timeline.lane_order(7, Lane.COMPUTE) == []


def test_the_span_is_that_of_the_operations() -> None:
    timeline = timeline_of(op(2, 3), op(2.5, 7), memory(Op.ALLOC, 1, 0.0), memory(Op.FREE, 1, 99.0))
    assert (timeline.start_s, timeline.end_s, timeline.span_s) == (2, 7, 5)
    assert Timeline(HEADER, []).span_s == 0.0


@given(timelines(), st.sets(st.sampled_from(Op)), st.integers(0, 3))
def test_select_keeps_what_has_the_values_and_nothing_else(timeline: Timeline, ops: set[Op], step: int) -> None:
    kept = timeline.select(lambda e: e.bytes % 2 == 0, op=ops, step=step)
    assert list(kept) == [e for e in timeline if e.op in ops and e.step == step and e.bytes % 2 == 0]
    assert kept.header == timeline.header
    assert list(timeline.select()) == list(timeline)


def test_select_takes_one_value_or_several_and_derived_fields() -> None:
    timeline = timeline_of(op(0, 1, unit="a"), op(1, 2, unit="b"), memory(Op.ALLOC, 8, 1.0))
    assert [e.unit for e in timeline.select(unit="a")] == ["a"]
    assert [e.unit for e in timeline.select(unit=("a", "b"))] == ["a", "b"]
    assert [e.bytes for e in timeline.select(is_memory=True)] == [8]


def test_select_names_a_field_that_events_do_not_have_even_when_there_are_none() -> None:
    with pytest.raises(TypeError, match=r"an event has no field 'lanes'; its fields are seq, rank, op, lane,"):
        Timeline(HEADER, []).select(lanes=Lane.COMPUTE)


def test_a_timeline_says_what_it_is() -> None:
    assert repr(timeline_of(op(0, 0.25))) == "Timeline(tests, simulated: 1 events, 1 rank, 1 step, 250.0 ms)"


# ---------------------------------------------------------------------- memory


allocs_and_frees = st.lists(
    st.builds(
        memory, st.sampled_from([Op.ALLOC, Op.FREE]), st.integers(0, 9), st.integers(0, 3).map(float),
        st.sampled_from(Memory), rank=st.integers(0, 2),
    )
)  # fmt: skip


@given(allocs_and_frees)
def test_live_bytes_are_what_one_counts_event_by_event(events: list[Event]) -> None:
    """What is alive, in the order in which streams reach it; the peak, in issue order, as the allocator counts."""
    timeline = timeline_of(op(0, 1), *events)
    for rank in range(timeline.header.world_size):
        times_s, live = timeline.live_bytes(rank)
        now: dict[Memory, int] = {}
        changes = sorted((e for e in timeline if e.rank == rank and e.is_memory), key=lambda e: (e.start_s, e.seq))
        for row, event in enumerate(changes):
            now[event.category] = now.get(event.category, 0) + (event.bytes if event.op == "alloc" else -event.bytes)
            assert {category: values[row] for category, values in live.items() if category in now} == now
        held, peak = 0, None
        for event in (e for e in timeline if e.rank == rank and e.is_memory):  # in issue order
            held += event.bytes if event.op == "alloc" else -event.bytes
            peak = held if peak is None else max(peak, held)
        assert times_s.tolist() == [e.start_s for e in changes]
        assert set(live) == set(now)
        assert timeline.peak_bytes(rank) == (peak or 0)


# ---------------------------------------------------------------------- files


@given(timelines())
def test_a_file_gives_back_the_same_timeline(tmp_path_factory: pytest.TempPathFactory, timeline: Timeline) -> None:
    path = tmp_path_factory.mktemp("timeline") / "run.jsonl"
    timeline.to_jsonl(path)
    again = Timeline.from_jsonl(str(path))
    assert again.header == timeline.header
    assert again.events == timeline.events
    assert len(path.read_text().splitlines()) >= 1


def test_a_line_is_one_event_with_its_defaults_left_out(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    timeline_of(op(0.25, 0.5, unit="layers.0")).to_jsonl(path)
    header, line = path.read_text().splitlines()
    assert header == '{"producer":"tests","clock":"simulated","world_size":1}'
    assert line == (
        '{"seq":0,"rank":0,"op":"FWD","lane":"compute","unit":"layers.0","issue_s":0.25,"start_s":0.25,"end_s":0.5}'
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"run\.jsonl is empty; a timeline starts with a header line"),
        ("garbage\n", r"run\.jsonl, line 1: "),
        ('{"clock":"simulated","world_size":1}\n', r"line 1: .*`producer`"),
        (
            '{"producer":"later","clock":"simulated","world_size":1,"version":2}\n',
            r"line 1: it has timeline version 2, this code reads version 1",
        ),
        (
            '{"producer":"p","clock":"simulated","world_size":1}\n'
            '{"seq":0,"rank":0,"op":"FWD","lane":"compute"}\n'
            '{"seq":1,"rank":0,"op":"NAP","lane":"compute"}\n',
            r"run\.jsonl, line 3: Invalid enum value 'NAP'",
        ),
        (
            '{"producer":"p","clock":"simulated","world_size":1}\n{"seq":0,"rank":0,"op":"FWD"\n',
            r"run\.jsonl, line 2: Input data was truncated",
        ),
    ],
    ids=["empty", "not JSON", "no header", "another version", "unknown operation", "cut short"],
)
def test_a_file_that_is_no_timeline_is_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Timeline.from_jsonl(path)


def test_a_column_is_made_when_it_is_read_and_no_event_before_it_is_asked_for() -> None:
    made: list[str] = []

    def lanes() -> list[Lane]:
        made.append("lane")
        return [Lane.COMPUTE, Lane.ALL_GATHER]

    columns = Columns(2, {"seq": [0, 1], "rank": [0, 0], "op": [Op.FWD, Op.ALL_GATHER], "lane": lanes, "bytes": [0, 8]})
    timeline = Timeline(HEADER, columns)

    assert (len(timeline), timeline.ranks, made) == (2, (0,), [])
    assert [event.lane for event in timeline.select(op=Op.ALL_GATHER)] == [Lane.ALL_GATHER]
    assert timeline.events[1] is timeline.events[1]
    assert made == ["lane"]


def test_columns_of_something_else_are_refused() -> None:
    with pytest.raises(TypeError, match="an event has no field 'duration'; its fields are seq, rank, op"):
        Columns(1, {"duration": [1.0]})
    with pytest.raises(TypeError, match="an event needs the field 'lane'"):
        Columns(1, {"seq": [0], "rank": [0], "op": [Op.FWD]})
