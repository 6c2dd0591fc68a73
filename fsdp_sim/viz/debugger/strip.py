"""`strip`: the lanes of a rank around a moment as a small inline SVG, with a cursor, and the other ranks below them.

The bars of a step are drawn once (`lanes`); a moment only adds a veil over what is still to come, outlines for the
event and for what it waited for, and the cursor. Only positions are percentages, so the strip fills its place and text
and hatching keep their shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from html import escape

from fsdp_sim.timeline import Event, Lane, Phase, Timeline, communicates
from fsdp_sim.viz import theme
from fsdp_sim.viz.debugger.moments import Moment, events_of, is_compute
from fsdp_sim.viz.debugger.sentences import name
from fsdp_sim.words import human_ms

ROW, BAR, TOP = 20, 14, 18  # pixels
THINNEST = 0.15  # percent of the width
MOST_BARS = 400  # in a row; where there are more, the longest
MOST_OTHERS = 3
LEGEND = (
    "Solid: issued. Faint: still to come. Outlined: this event, dashed what it waits for. Red line: when the CPU "
    "issues it."
)
HATCH = (
    '<defs><pattern id="fsd-hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="2" height="6" fill="#fff" fill-opacity=".4"/></pattern></defs>'
)


@dataclass(frozen=True)
class StripLane:
    """A line of the strip: a lane of the rank, or another rank with compute above and communication below."""

    label: str
    events: tuple[Event, ...]
    is_other: bool


@dataclass(frozen=True)
class Lanes:
    """The operations of a step, with the time they span; ``bars`` is their SVG."""

    first_s: float
    span_s: float
    rows: tuple[StripLane, ...]
    bars: str

    @property
    def height(self) -> int:
        return TOP + len(self.rows) * ROW + 4

    def percent(self, time_s: float) -> float:
        """Where in the width a time is."""
        return min(100.0, max(0.0, 100 * (time_s - self.first_s) / self.span_s))

    def place(self, event: Event, row: int) -> str:
        """The attributes of an event's rectangle in a row."""
        x = self.percent(event.start_s)
        width = max(THINNEST, self.percent(event.end_s) - x)
        y, height = TOP + row * ROW + (ROW - BAR) // 2, BAR
        if self.rows[row].is_other:
            y, height = y + (8 if communicates(event.op, event.lane) else -1), ROW // 2 - 3
        return f'x="{x:.2f}%" y="{y}" width="{width:.2f}%" height="{height}"'


def strip(at: Moment, timeline: Timeline, drawn_as: str = "") -> str:
    """The operations of the step of a moment's event, by lane.

    Args:
        drawn_as: the id under which the page has the bars already, see `lanes_of`; they are drawn here if empty.
    """
    lanes = lanes_of(at, timeline)
    if lanes is None:
        return ""
    labels = "".join(f"<span>{row.label}</span>" for row in lanes.rows)
    title = escape(f"Step {at.event.step} of rank {at.event.rank} by lane, {human_ms(lanes.span_s)}")
    bars = f'<use href="#{drawn_as}"/>' if drawn_as else HATCH + lanes.bars
    return (
        f'<div class="fsd-strip"><div class="fsd-lanes" aria-hidden="true" style="padding-top:{TOP}px">{labels}</div>'
        f'<svg role="img" aria-label="{title}" width="100%" height="{lanes.height}">{bars}{_now(at, lanes)}</svg></div>'
        f'<div class="fsd-where">{LEGEND}</div>'
    )


def lanes_of(at: Moment, timeline: Timeline) -> Lanes | None:
    """The bars behind a moment; None where its step has no operations.

    A first optimizer step takes long and would leave no width for the rest, so it is drawn when it is its turn.
    """
    return _lanes(timeline, at.event.rank, at.event.step, at.event.phase is Phase.OPTIMIZER)


@lru_cache(maxsize=8)
def _lanes(timeline: Timeline, rank: int, step: int, with_optimizer: bool) -> Lanes | None:
    def shown(of: int) -> list[Event]:
        in_step = (e for e in events_of(timeline, of) if e.step == step and not e.is_memory)
        return [e for e in in_step if with_optimizer or e.phase is not Phase.OPTIMIZER]

    mine = shown(rank)
    if not mine:
        return None
    first_s, last_s = min(e.start_s for e in mine), max(e.end_s for e in mine)
    rows = [StripLane(theme.LANE_NAMES[lane], _longest([e for e in mine if e.lane is lane]), False) for lane in Lane]
    for other in [r for r in timeline.ranks if r != rank][:MOST_OTHERS]:
        beside = [e for e in shown(other) if e.end_s >= first_s and e.start_s <= last_s]
        rows.append(StripLane(f"rank {other}", _longest(beside), True))
    kept = tuple(row for row in rows if row.events or row.is_other)
    lanes = Lanes(first_s, (last_s - first_s) or 1.0, kept, "")
    bars = "".join(_bar(e, lanes, number) for number, row in enumerate(kept) for e in row.events)
    return Lanes(lanes.first_s, lanes.span_s, kept, _phases(mine, lanes) + bars)


def _longest(events: list[Event]) -> tuple[Event, ...]:
    """In issue order."""
    if len(events) > MOST_BARS:
        events = sorted(events, key=lambda e: -e.duration_s)[:MOST_BARS]
    return tuple(sorted(events, key=lambda e: e.seq))


def _bar(event: Event, lanes: Lanes, row: int) -> str:
    kind, place = theme.KINDS[event.op], lanes.place(event, row)
    bar = f'<rect {place} fill="{kind.color}"><title>{escape(name(event))}</title></rect>'
    if kind.hatched:
        bar += f'<rect {place} fill="url(#fsd-hatch)" pointer-events="none"/>'
    x, end = lanes.percent(event.start_s), lanes.percent(event.end_s)
    if is_compute(event) and end - x > 2.5 and not lanes.rows[row].is_other:
        y = TOP + row * ROW + (ROW - BAR) // 2 + BAR - 3
        text = escape(theme.short_unit(event.unit)[:10])
        place = f'x="{(x + end) / 2:.2f}%" y="{y}" text-anchor="middle"'
        bar += f'<text class="fsd-unit" {place} fill="{kind.text_color}">{text}</text>'
    return bar


def _phases(events: list[Event], lanes: Lanes) -> str:
    """Names of the phases where they begin, and a line."""
    parts, before = [], ""
    for event in events:
        if event.phase and event.phase != before:
            x = lanes.percent(event.start_s)
            parts.append(
                f'<line class="fsd-phase" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{lanes.height}"/>'
                f'<text class="fsd-word" x="{x:.2f}%" dx="3" y="11">{event.phase}</text>'
            )
            before = event.phase
    return "".join(parts)


def _now(at: Moment, lanes: Lanes) -> str:
    """What a moment adds: veils, outlines, the cursor."""
    parts, waited = [], {e.seq for e in at.waits_on}
    for number, row in enumerate(lanes.rows):
        issued = [e for e in row.events if (e.issue_s <= at.event.issue_s if row.is_other else e.seq <= at.event.seq)]
        x = max((lanes.percent(e.end_s) for e in issued), default=0.0)
        if len(issued) < len(row.events):
            y = TOP + number * ROW
            parts.append(f'<rect class="fsd-veil" x="{x:.2f}%" y="{y}" width="{100 - x:.2f}%" height="{ROW}"/>')
        for event in [] if row.is_other else issued:
            if event.seq == at.event.seq or event.seq in waited:
                outline = "fsd-now" if event.seq == at.event.seq else "fsd-waited"
                parts.append(f'<rect class="{outline}" {lanes.place(event, number)}/>')
    x = lanes.percent(at.event.issue_s)
    return "".join(parts) + f'<line class="fsd-cursor" x1="{x:.2f}%" x2="{x:.2f}%" y1="13" y2="{lanes.height}"/>'
