"""Moments of a run worth stopping at, for a reader who cannot step: a saved notebook, a slide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from fsdp_sim.timeline import COLLECTIVES, Event, Timeline
from fsdp_sim.viz.debugger.moments import Moment, events_of, moment
from fsdp_sim.viz.debugger.sentences import name, sentence
from fsdp_sim.viz.debugger.sources import CodeLine, learners_line, minis_line, places
from fsdp_sim.viz.table import cell, row, table_html
from fsdp_sim.words import human_bytes, human_ms

AROUND = 4  # events before and after a telling one


@dataclass(frozen=True)
class NotableMoment:
    """A moment worth stopping at, and why."""

    title: str
    moment: Moment


def notable_moments(timeline: Timeline, rank: int, events: tuple[Event, ...]) -> list[NotableMoment]:
    """Of some events of a rank: where it waited longest for the network, and where most memory was alive."""
    found = []
    moments = [moment(timeline, rank, e.seq) for e in _candidates(events)]
    if exposed := [m for m in moments if m.event.duration_s > m.hidden_s]:
        worst = max(exposed, key=lambda m: m.event.duration_s - m.hidden_s)
        seconds = human_ms(worst.event.duration_s - worst.hidden_s)
        found.append(NotableMoment(f"The longest wait for the network: {seconds} of the {name(worst.event)}", worst))
    if (peak := _peak(timeline, rank, events)) is not None:
        found.append(NotableMoment(f"The most memory alive: {human_bytes(peak.live_bytes)}", peak))
    if not found and events:
        found.append(NotableMoment("How it begins", moment(timeline, rank, events[0].seq)))
    return sorted(found, key=lambda t: t.moment.position)


def _candidates(events: tuple[Event, ...], most: int = 20) -> list[Event]:
    """The longest collectives."""
    return sorted((e for e in events if e.op in COLLECTIVES), key=lambda e: -e.duration_s)[:most]


def _peak(timeline: Timeline, rank: int, events: tuple[Event, ...]) -> Moment | None:
    """The event, of those given, after which most is alive."""
    total = most = 0
    at, wanted = None, {e.seq for e in events}
    for event in events_of(timeline, rank):
        total += event.bytes if event.op == "alloc" else -event.bytes if event.op == "free" else 0
        if event.seq in wanted and total > most:
            most, at = total, event
    return None if at is None else moment(timeline, rank, at.seq)


def static_html(timeline: Timeline, rank: int, events: tuple[Event, ...]) -> str:
    """The telling moments with the events around them, as HTML that any viewer of saved notebooks shows."""
    parts = []
    for stop in notable_moments(timeline, rank, events):
        at = stop.moment
        around = at.events[max(0, at.position - AROUND) : at.position + AROUND + 1]
        shown = [moment(timeline, rank, e.seq) for e in around]
        columns = [column for column in COLUMNS if any(column[1](m) for m in shown)]
        head = row(_cell("th", title, False) for title, _ in columns)
        rows = (row(_cell("td", html(m), m.event.seq == at.event.seq) for _, html in columns) for m in shown)
        parts.append(f"<p><strong>{escape(stop.title)}</strong><br>{escape(sentence(at))}</p>{table_html(rows, head)}")
    return "".join(parts)


def _lines(at: Moment) -> str:
    found = places(at.event)
    return "<br>".join(_line(p) for p in (learners_line(found), minis_line(found)) if p is not None)


COLUMNS: tuple[tuple[str, Callable[[Moment], str]], ...] = (
    ("event", lambda at: str(at.event.seq)),
    ("what", lambda at: escape(name(at.event))),
    ("alive after it", lambda at: human_bytes(at.live_bytes).replace(" ", "&nbsp;") if at.top_bytes else ""),
    ("your line, and the mini's", _lines),
    ("what it is, and why now", lambda at: escape(sentence(at))),
)


def _cell(tag: str, html: str, here: bool) -> str:
    """A cell of HTML. GitHub drops styles, so what matters is bold too; JupyterLab sets text to the right by itself."""
    style = "text-align:left;vertical-align:top" + (";background:rgba(240,180,41,.26)" if here else "")
    return cell(f"<strong>{html}</strong>" if here else html, f' style="{style}"', tag)


def _line(at: CodeLine) -> str:
    code = f": <code>{escape(at.text)}</code>" if at.text else ""
    return f"{escape(at.title)}:{at.line}{code}"
