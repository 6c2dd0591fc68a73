"""The figure of a training step: lanes of operations over live memory, several timelines on one time axis.

Every bar is an event (or a few neighbours, or the median of many ranks, and the figure says so), every area comes from
`Timeline.live_bytes`, and the title is computed from both, so the picture cannot say anything the record does not.
The peak in words is that of `Timeline.peak_bytes`, counted as an allocator counts: in issue order. The areas are drawn
where the device gets to an allocation, a little later, so their summit may be a percent or two off.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from fsdp_sim.timeline import Lane
from fsdp_sim.viz import theme
from fsdp_sim.viz.steps.bands import ManyRanks, band_traces, bands_sentence, bands_subtitle, views_of
from fsdp_sim.viz.steps.bars import Bars, bar_trace, bar_traces, bars_of
from fsdp_sim.viz.steps.hover import details
from fsdp_sim.viz.steps.layout import Panel, lay_out
from fsdp_sim.viz.steps.rows import BAR
from fsdp_sim.viz.steps.step_view import MAX_BARS, StepView, Timelines
from fsdp_sim.viz.steps.summary import blame, headline, subtitle
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_ms


def timeline_figure(
    timelines: Timelines,
    *,
    ranks: Iterable[int] | None = None,
    step: int | None = None,
    titles: Sequence[str] | None = None,
    memory_rank: int | None = None,
) -> go.Figure:
    """Draw one step of one or more timelines, one above the other, on the same time axis in milliseconds.

    Each timeline has a row per rank and lane (only lanes that occur), its phases in brackets above them, red boxes on
    the compute lane where communication is exposed, and below them the live memory of one rank. Time 0 is where the
    step begins.

    Args:
        timelines: a `Timeline`, a list of them, or a dict of name to `Timeline`; drawn from top to bottom.
        ranks: the ranks to draw, by default the first of each timeline, four at most.
        step: the step to draw, by default in each timeline the one of median duration, the first left out.
        titles: names to use in place of the dict's keys or the headers' titles.
        memory_rank: whose memory to draw, by default the first rank drawn.

    Returns:
        a plain figure without a width, so it fills the place it is shown in; show it with `fsdp_sim.viz.show`.

    Raises:
        ValueError: a timeline is empty, or has not the rank or step asked for (the message names those it has).
    """
    return draw(views_of(timelines, ranks=ranks, step=step, titles=titles), memory_rank)


def draw(views: Sequence[StepView], memory_rank: int | None = None) -> go.Figure:
    """The figure of views that have been chosen; see `timeline_figure`."""
    for view in views:
        if memory_rank is not None and memory_rank not in view.timeline.ranks:
            raise ValueError(
                f"memory_rank {memory_rank} is not in timeline {view.name!r}; it has {list(view.timeline.ranks)}"
            )
    panels = [Panel(view, view.ranks[0] if memory_rank is None else memory_rank) for view in views]
    drawn = [bars_of(view, MAX_BARS // len(views)) for view in views]
    step_ms = max(view.step_s for view in views) * 1e3
    data: list[dict[str, Any]] = []
    for panel, bars in zip(panels, drawn, strict=True):
        lanes = [*_exposed_bars(panel, step_ms), *_operation_bars(panel, bars, step_ms)]
        if isinstance(panel.view, ManyRanks):
            lanes = [*band_traces(panel.view, panel.rows.centres, step_ms), *lanes]
        panel.traces = lanes, panel.strip.traces()
    layout = lay_out(panels, _title(views), _notes(views, drawn))
    layout["meta"]["timeline"] = _links(panels, drawn)
    named: set[str] = set()  # legend entries already made
    for panel in panels:
        for traces, axis in zip(panel.traces, (panel.lanes_axis, panel.memory_axis), strict=True):
            for trace in traces:
                shown = trace.get("showlegend", True) and trace["name"] not in named
                data.append(trace | {"yaxis": axis, "showlegend": shown})
                named |= {trace["name"]} if shown else set()
    return go.Figure({"data": data, "layout": layout}, _validate=False)  # what is made here is valid, and large


def _title(views: Sequence[StepView]) -> str:
    (first, *others) = views
    return bands_sentence(first) if isinstance(first, ManyRanks) and not others else headline(views)


def _notes(views: Sequence[StepView], drawn: Sequence[Bars]) -> list[str]:
    """The lines below the title: what the step is like, and what is not drawn bar by bar."""
    notes = [subtitle(view) for view in views if len(views) == 1 and not isinstance(view, ManyRanks)]
    notes += [bands_subtitle(view.bands) for view in views if isinstance(view, ManyRanks)]
    for view, bars in zip(views, drawn, strict=True):
        if note := _merged(view, bars):
            notes.append(note if len(views) == 1 else f"{view.name}: {note}")
    return notes


def _links(panels: Sequence[Panel], drawn: Sequence[Bars]) -> dict[str, Any]:
    """What `browser.js` lights up, as numbers of bars, which count on from trace to trace and panel to panel.

    ``cause``: of each bar the one that made it begin when it did, -1 for none; ``waits``: those it waited for beside;
    ``paths``: of each panel its critical path.
    """
    cause: list[int] = []
    waits: list[list[int]] = []
    paths: list[list[int]] = []
    for panel, bars in zip(panels, drawn, strict=True):
        links, first = panel.view.links, len(cause)
        keys = list(panel.view.timeline.columns.rows("rank", "seq"))
        bar_of = {keys[row]: first + k for k, some in enumerate(bars.members) for row in some}
        for k, some in enumerate(bars.members, start=first):
            made = links.made_by(keys[some[0]])
            cause.append(bar_of.get(made, -1) if made else -1)
            others = {bar_of.get(key, -1) for row in some for key in links.waited_for(keys[row])}
            waits.append(sorted(others - {-1, k, cause[-1]}))
        if isinstance(panel.view, ManyRanks):  # its path leads over ranks that are not drawn
            continue
        path = [bar_of.get(piece.key, -1) for piece in links.critical_path() if not piece.cpu]
        paths.append([k for k in dict.fromkeys(path) if k >= 0])
    return {"cause": cause, "waits": waits, "paths": paths}


def _merged(view: StepView, bars: Bars) -> str:
    """That not every operation is a bar of its own; empty if each is."""
    if not bars.merged_ms:
        return ""
    return (
        f"{len(view.rows):,} operations are {len(bars):,} bars: neighbours within {human_ms(bars.merged_ms / 1e3)} "
        "are merged, as high as the part of that time they run."
    )


def _operation_bars(panel: Panel, bars: Bars, step_ms: float) -> list[dict[str, Any]]:
    view = panel.view
    rows, heights = panel.rows.of(bars)
    events = view.timeline.events
    more = [details(events[some[0]], view.links) if len(some) == 1 else "" for some in bars.members]
    return bar_traces(view, bars, rows, heights, more, step_ms=step_ms)


def _exposed_bars(panel: Panel, step_ms: float) -> list[dict[str, Any]]:
    view = panel.view
    waits = [(rank, start_s, end_s) for rank in view.ranks for start_s, end_s in view.exposed(rank)]
    if not waits:
        return []
    starts, lengths = (
        np.array(column) for column in zip(*((view.since_ms(s), (e - s) * 1e3) for _, s, e in waits), strict=True)
    )
    rows = np.array([panel.rows.centres[rank, Lane.COMPUTE] for rank, _, _ in waits])
    sentences = [
        f"<b>exposed communication</b>, {human_ms(end_s - start_s)}<br>rank {rank} computes nothing<br>while "
        + ", ".join(safe(e.label) for e in blame(view, rank, start_s, end_s)[:3])
        + " runs"
        for rank, start_s, end_s in waits
    ]
    trace = bar_trace(theme.EXPOSED, starts, lengths, rows, np.full(len(rows), BAR), step_ms)
    trace["marker"]["line"] = {"color": theme.EXPOSED.text_color, "width": 0.75}
    texts = [human_ms(end_s - start_s) for _, start_s, end_s in waits]
    return [trace | {"text": texts, "textposition": "inside", "hovertext": sentences, "hoverinfo": "text"}]
