"""`debugger_page`: the same stepping as one file that needs no kernel, no network and no script.

Every moment is a radio button followed by its panes, and a browser shows the panes of the chosen button alone. The
buttons of a group are what the arrow keys step through, so that HTML itself is the scrubber.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from fsdp_sim.timeline import Event, Phase, Timeline, median_step, timeline_of, written
from fsdp_sim.viz import theme
from fsdp_sim.viz.debugger.moments import Moment, events_of, moment, next_of_unit, next_on_lane
from fsdp_sim.viz.debugger.panes import panes
from fsdp_sim.viz.debugger.sentences import name
from fsdp_sim.viz.debugger.stepping import Debugger, debugger
from fsdp_sim.viz.debugger.strip import HATCH, lanes_of
from fsdp_sim.viz.debugger.style import CSS

MOST_MOMENTS = 600  # about 15 kB each
MOST_RANKS = 4

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_PAGE_CSS = f"""
:root {{ color-scheme: light dark; }}
@media (prefers-color-scheme: dark) {{ :root {{
  --jp-content-font-color1: #E6EDF3; --jp-content-font-color2: #9DA7B3; --jp-layout-color0: #111418;
  --jp-cell-editor-background: #1C2229; --jp-border-color2: #30363D; --jp-mirror-editor-keyword-color: #79C0FF;
  --jp-mirror-editor-string-color: #A5D6A7; --jp-mirror-editor-comment-color: #9DA7B3;
  --jp-mirror-editor-number-color: #79C0FF; --jp-mirror-editor-def-color: #D2A8FF;
  --jp-mirror-editor-builtin-color: #D2A8FF; --jp-mirror-editor-meta-color: #FFB77C; }} }}
body {{ margin: 0; background: var(--jp-layout-color0, #fff); color: var(--jp-content-font-color1, {theme.INK});
  font: 15px/1.5 {theme.FONT}; }}
main {{ max-width: 1240px; margin: 0 auto; padding: 20px 20px 40px; }}
h1 {{ font-size: 1.5rem; margin: 0 0 .25rem; }}
main > svg {{ position: absolute; }}
.fsd-film {{ display: flex; flex-wrap: wrap; align-items: center; gap: 2px; }}
.fsd-film > span {{ flex-basis: 100%; font-size: 12px; margin-top: 4px; }}
.fsd-film > input {{ appearance: none; margin: 0; width: 8px; height: 18px; border-radius: 2px; cursor: pointer;
  background: var(--kind); }}
.fsd-film > input.fsd-hollow {{ height: 8px; background: none; border: 2px solid var(--kind); }}
.fsd-film > input:checked, .fsd-film > input:focus-visible {{ outline: 2px solid #D55E00; outline-offset: 1px; }}
.fsd-film > section {{ order: 1; flex-basis: 100%; min-width: 0; display: none; }}
.fsd-film > input:checked + section {{ display: block; }}
.fsd-moves {{ display: flex; flex-wrap: wrap; gap: 6px; margin: 10px 0; font-size: 13px; }}
.fsd-moves > * {{ border: 1px solid var(--jp-border-color2, #D0D7DE); border-radius: 5px; padding: 2px 10px; }}
.fsd-moves > label {{ cursor: pointer; }} .fsd-moves > span {{ opacity: .45; }}
"""


def debugger_page(
    path: str | Path, results_or_timeline: Any, *, rank: int = 0, step: int | None = None, title: str = ""
) -> Path:
    """Write a page that steps through a run forwards and backwards, offline.

    Args:
        path: the file to write.
        results_or_timeline: as for `debugger`.
        rank: the first rank shown; up to three others follow, as many as there is room for.
        step: the training step to step through; a typical one by default.

    Raises:
        TypeError, ValueError: as `debugger`; or one rank has too many events for a page.
    """
    timeline = timeline_of(results_or_timeline)
    if step is None and timeline.ops:
        step = median_step(timeline)
    ats = [debugger(timeline, rank=rank, step=step)]
    if len(ats[0].events) > MOST_MOMENTS:
        raise ValueError(
            f"step {step} of rank {rank} has {len(ats[0].events):,} events, and a page holds {MOST_MOMENTS}; write the "
            "page of a smaller model, or of timeline.select(...) with fewer events"
        )
    for other in [r for r in timeline.ranks if r != rank][: MOST_RANKS - 1]:
        events = sum(step in (None, e.step) for e in events_of(timeline, other))
        if events and sum(len(at.events) for at in ats) + events <= MOST_MOMENTS:
            ats.append(debugger(timeline, rank=other, step=step))
    title = title or timeline.header.title or "A step, event by event"
    sentence = (
        f"Step {ats[0].events[0].step} of {timeline.header.producer}, {timeline.header.clock}. Choose an event, then "
        "step with the arrow keys. Full squares are operations, hollow ones are memory."
    )
    drawn: dict[str, str] = {}  # the bars of a strip, once for all the moments that show them
    film = _film(ats, timeline, drawn)
    bars = "".join(f'<g id="{id}">{bars}</g>' for id, bars in drawn.items())
    target = Path(path)
    page = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{escape(title)}</title>
<style>{CSS}{_PAGE_CSS}</style></head>
<body><main><h1>{escape(title)}</h1><p>{escape(sentence)}</p>
<svg width="0" height="0" aria-hidden="true" class="fsd-strip">{HATCH}{bars}</svg>
<div class="fsd-film" role="radiogroup" aria-label="Events, in issue order">
{film}
</div></main></body></html>
"""
    with written(target) as new:
        new.write_text(page, encoding="utf-8")
    return target


def _film(ats: list[Debugger], timeline: Timeline, drawn: dict[str, str]) -> str:
    there = {(e.rank, e.seq) for at in ats for e in at.events}
    start = ats[0].moment.event
    parts = []
    for at in ats:
        parts.append(f"<span>rank {at.rank}</span>")
        for position, event in enumerate(at.events):
            shown = moment(timeline, at.rank, event.seq)
            drawn_as = f"bars-{event.rank}{'-optimizer' if event.phase is Phase.OPTIMIZER else ''}"
            if drawn_as not in drawn and (lanes := lanes_of(shown, timeline)) is not None:
                drawn[drawn_as] = lanes.bars
            kind = theme.MEMORY[event.category] if event.is_memory else theme.KINDS[event.op]
            checked = " checked" if (event.rank, event.seq) == (start.rank, start.seq) else ""
            hollow = ' class="fsd-hollow"' if event.is_memory else ""
            label = escape(f"rank {event.rank}, event {event.seq}: {name(event)}", quote=True)
            parts.append(
                f'<input type="radio" name="moment" id="{_id(event)}"{hollow}{checked} style="--kind:{kind.color}" '
                f'aria-label="{label}" title="{label}"><section>{_moves(at.events, position, shown, there)}'
                f"{panes(shown, timeline, drawn_as)}</section>"
            )
    return "\n".join(parts)


def _moves(events: tuple[Event, ...], position: int, at: Moment, there: set[tuple[int, int]]) -> str:
    """Labels of other buttons: a click on one chooses its moment."""
    goals: list[tuple[str, Event | None]] = [
        ("First", events[0]),
        ("◀ Back", events[position - 1] if position else None),
        ("Next ▶", events[position + 1] if position + 1 < len(events) else None),
        ("Last", events[-1]),
        (f"Next of {at.event.unit or 'no unit'}", next_of_unit(at)),
        (f"Next on {theme.LANE_NAMES[at.event.lane]}", next_on_lane(at)),
        *((f"Same on rank {o.rank}", o.match) for o in at.others if o.match and (o.rank, o.match.seq) in there),
    ]
    return f'<div class="fsd-moves">{"".join(_move(text, goal, there) for text, goal in goals)}</div>'


def _move(text: str, goal: Event | None, there: set[tuple[int, int]]) -> str:
    if goal is None or (goal.rank, goal.seq) not in there:
        return f"<span>{escape(text)}</span>"
    return f'<label for="{_id(goal)}">{escape(text)}</label>'


def _id(event: Event) -> str:
    return f"moment-{event.rank}-{event.seq}"
