"""What a saved notebook shows: the moments worth stopping at, as tables that need neither kernel nor style."""

import re

from hypothesis import given

from fsdp_sim.timeline import Memory, Op, Timeline
from fsdp_sim.viz.debugger import debugger
from fsdp_sim.viz.debugger.moments import events_of
from fsdp_sim.viz.debugger.notable_moments import notable_moments, static_html
from tests.timeline.strategies import gather, op, timeline_of, timelines


def test_the_longest_wait_and_the_peak() -> None:
    timeline = timeline_of(
        gather(0, 3, unit="hidden"), op(0, 3, seq=1), gather(4, 6, unit="exposed", seq=2),
        op(6, 6, Op.ALLOC, bytes=2048, category=Memory.LOGITS, seq=3),
        op(6, 6, Op.FREE, bytes=2048, category=Memory.LOGITS, seq=4),
    )  # fmt: skip
    wait, peak = notable_moments(timeline, 0, events_of(timeline, 0))
    assert wait.title == "The longest wait for the network: 2,000 ms of the all-gather of exposed"
    assert (peak.title, peak.moment.event.seq) == ("The most memory alive: 2.00 KiB", 3)


def test_of_one_step_its_own_peak(run: Timeline) -> None:
    events = debugger(run, step=0).events
    (peak,) = [t.moment for t in notable_moments(run, 0, events) if t.title.startswith("The most memory alive")]
    assert peak.event.step == 0
    assert peak.live_bytes == max(m.live_bytes for m in (debugger(run, step=0).go(e.seq) for e in events))


def test_without_network_and_memory_it_shows_how_it_begins() -> None:
    timeline = timeline_of(op(0, 1), op(1, 2, seq=1))
    (only,) = notable_moments(timeline, 0, events_of(timeline, 0))
    assert (only.title, only.moment.event.seq) == ("How it begins", 0)


@given(timelines())
def test_any_timeline_has_a_static_form(timeline: Timeline) -> None:
    for rank in timeline.ranks:
        html = static_html(timeline, rank, events_of(timeline, rank))
        assert html.count("<table>") == html.count("</table>") >= 1
        assert "<strong>" in html


def test_lines_are_shown_where_there_are_any_and_no_empty_column_where_not(run: Timeline, predicted: Timeline) -> None:
    measured = static_html(run, 0, events_of(run, 0))
    assert re.search(r"training\.py:\d+: <code>", measured)
    assert re.search(r"fsdp_sim/mini/\w+\.py:\d+: <code>", measured)
    assert "your line" not in static_html(predicted, 0, events_of(predicted, 0))


def test_nothing_in_it_is_taken_for_html_and_nothing_runs() -> None:
    evil = "<script>alert(1)</script>"
    timeline = timeline_of(
        gather(0, 1, unit=evil, source=f"{evil}.py:3"), op(0, 0, Op.ALLOC, unit=evil, bytes=1, seq=1)
    )
    html = static_html(timeline, 0, events_of(timeline, 0))
    assert "<script" not in html
    assert "&lt;script&gt;" in html
