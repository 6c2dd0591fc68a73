"""The figure of a training step: lanes of operations over live memory, several timelines on one time axis.

Every bar is an event, every area comes from `Timeline.live_bytes`, and the title is computed from both, so the
picture cannot say anything the record does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.timeline import Event, Lane
from fsdp_sim.timeline.analysis import communicates
from fsdp_sim.viz import theme
from fsdp_sim.viz.layout import THIN, Panel, lay_out
from fsdp_sim.viz.summary import StepView, Timelines, step_views
from fsdp_sim.viz.theme import KINDS, Kind, human_bytes, human_ms, safe, short_unit

BAR = 0.92  # of the height of its row
MAX_TEXT_BARS = 1_500  # plotly measures every text inside a bar; above this the hover text has to do


def timeline_figure(
    timelines: Timelines,
    *,
    ranks: Iterable[int] | None = None,
    step: int | None = None,
    titles: Sequence[str] | None = None,
    memory_rank: int | None = None,
) -> go.Figure:
    """Draw one step of one or more timelines, one above the other, on the same time axis in milliseconds.

    Each timeline has a row per rank and lane (only lanes that occur), red bands on the compute lane where
    communication is exposed, and below them the live memory of one rank. Time 0 is where the step begins.

    Args:
        timelines: a `Timeline`, a list of them, or a dict of name to `Timeline`; drawn from top to bottom.
        ranks: the ranks to draw, by default the first four of each timeline.
        step: the step to draw, by default in each timeline the one of median duration, the first left out.
        titles: names to use in place of the dict's keys or the headers' titles.
        memory_rank: whose memory to draw, by default the first rank drawn.

    Returns:
        a plain figure without a width, so it fills the place it is shown in; show it with `fsdp_sim.viz.show`.

    Raises:
        ValueError: a timeline is empty, or has not the rank or step asked for (the message names those it has).
    """
    views = step_views(timelines, ranks=ranks, step=step, titles=titles)
    for view in views:
        if memory_rank is not None and memory_rank not in view.timeline.ranks:
            raise ValueError(
                f"memory_rank {memory_rank} is not in timeline {view.name!r}; it has {list(view.timeline.ranks)}"
            )
    panels = [Panel(view, view.ranks[0] if memory_rank is None else memory_rank) for view in views]
    figure = go.Figure()
    lay_out(figure, panels)
    named: set[str] = set()  # legend entries already made
    with_text = sum(len(view.ops) for view in views) <= MAX_TEXT_BARS
    for panel in panels:
        for trace in [*_exposed_bars(panel), *_operation_bars(panel, with_text)]:
            figure.add_trace(trace.update(yaxis=panel.lanes_axis))
        for trace in _memory_areas(panel.view, panel.memory_rank):
            figure.add_trace(trace.update(yaxis=panel.memory_axis))
    for trace in figure.data:
        trace.update(legendgroup=trace.name, showlegend=trace.name not in named)
        named.add(trace.name)
    return figure


def _since_ms(view: StepView, time_s: float) -> float:
    return (time_s - view.origin_s) * 1e3


def _bars(kind: Kind, rows: list[dict[str, Any]], **more: Any) -> go.Bar:
    """A trace of horizontal bars, one for each row's base, x, y, width, text and hover text."""

    def column(name: str) -> list[Any]:
        return [row[name] for row in rows]

    return go.Bar(
        name=kind.name,
        orientation="h",
        base=column("base"),
        x=column("x"),
        y=column("y"),
        width=column("width"),
        text=column("text"),
        hovertext=column("hovertext"),
        hoverinfo="text",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": kind.text_color, "size": 11},
        cliponaxis=True,
        marker={"color": kind.color, "pattern": theme.hatch(kind), "line": {"width": 0.5, "color": "#FFFFFF"}},
        **more,
    )


def _operation_bars(panel: Panel, with_text: bool) -> list[go.Bar]:
    view = panel.view
    by_seq = {(e.rank, e.seq): e for rank in view.ranks for e in view.by_rank[rank]}
    rows: dict[Kind, list[dict[str, Any]]] = {}
    for event in view.ops:
        rows.setdefault(KINDS[event.op], []).append(
            {
                "base": _since_ms(view, event.start_s),
                "x": event.duration_s * 1e3,
                "y": panel.rows[event.rank, event.lane],
                "width": THIN.get(event.lane, 1.0) * BAR,
                "text": safe(short_unit(event.unit)),
                "hovertext": _hover(view, event, by_seq),
            }
        )
    position = "inside" if with_text else "none"
    order = list(dict.fromkeys(KINDS.values()))
    return [_bars(kind, rows[kind], textposition=position) for kind in order if kind in rows]


def _exposed_bars(panel: Panel) -> list[go.Bar]:
    view = panel.view
    rows = []
    for rank in view.ranks:
        running = [e for e in view.ops if e.rank == rank and communicates(e.op, e.lane)]
        for start_s, end_s in view.exposed(rank):
            blame = ", ".join(safe(e.label) for e in running if e.start_s < end_s and e.end_s > start_s)
            rows.append(
                {
                    "base": _since_ms(view, start_s),
                    "x": (end_s - start_s) * 1e3,
                    "y": panel.rows[rank, Lane.COMPUTE],
                    "width": BAR,
                    "text": "",
                    "hovertext": f"<b>exposed communication</b>, {human_ms(end_s - start_s)}<br>"
                    f"rank {rank} computes nothing<br>while {blame} runs",
                }
            )
    trace = _bars(theme.EXPOSED, rows, textposition="none", legendrank=2000)
    return [trace.update(marker_line={"color": theme.EXPOSED.text_color, "width": 0.75})] if rows else []


def _hover(view: StepView, event: Event, by_seq: dict[tuple[int, int], Event]) -> str:
    start_ms, end_ms, issue_ms = (_since_ms(view, t) for t in (event.start_s, event.end_s, event.issue_s))
    lines = [
        f"<b>{theme.OP_NAMES[event.op]} {safe(event.unit)}</b>, {human_ms(event.duration_s)}",
        f"rank {event.rank}, {theme.LANE_NAMES[event.lane]} lane, from {start_ms:.2f} to {end_ms:.2f} ms",
        f"issued at {issue_ms:.2f} ms"
        + (f", began {human_ms(w)} later" if (w := event.start_s - event.issue_s) > 0 else ""),
    ]
    if event.bytes:
        group = f" among {event.group_size} ranks" if event.group_size > 1 else ""
        lines.append(f"{human_bytes(event.bytes)}{group}" + (f", {safe(event.dtype)}" if event.dtype else ""))
    for seq in event.waits_on:
        other = by_seq.get((event.rank, seq))
        lines.append(
            f"waited for {safe(other.label)}, {human_ms(other.duration_s)}" if other else f"waited for event {seq}"
        )
    if event.source:
        lines.append(safe(event.source))
    return "<br>".join(lines)


def _memory_areas(view: StepView, rank: int) -> list[go.Scatter]:
    times_s, live = view.live(rank)
    areas = []
    for category, n_bytes in live.items():
        kind = theme.MEMORY[category]
        areas.append(
            go.Scatter(
                name=kind.name,
                x=times_s * 1e3,
                y=n_bytes,
                stackgroup=f"{view.name}/memory",
                line={"shape": "hv", "width": 0},
                mode="lines",
                fillcolor=kind.color,
                fillpattern=theme.hatch(kind) | {"bgcolor": kind.color},
                legend="legend2",
                hoverinfo="text",
                hovertext=[
                    f"<b>{kind.name}</b>, {human_bytes(n)}<br>rank {rank}, at {t * 1e3:.2f} ms"
                    for t, n in zip(times_s, n_bytes, strict=True)
                ],
            )
        )
    return areas
