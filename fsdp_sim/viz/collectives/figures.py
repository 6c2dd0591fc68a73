"""The figures of a collective: the one that moves, and the film strip."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz import theme
from fsdp_sim.viz.collectives.grid import (
    GAP,
    TWICE_UP_TO,
    RingGrid,
    legend_traces,
    moving_traces,
    row_names,
    styled,
    used_cells,
)
from fsdp_sim.viz.collectives.scenes import CollectiveFrame, formula
from fsdp_sim.viz.collectives.steps import CollectiveRun
from fsdp_sim.viz.frames import (
    BUTTONS_PX,
    SLIDER_PX,
    add_player,
    legend_at,
    sentence_of,
    title_of,
    words_axes,
    words_of,
)
from fsdp_sim.viz.theme import safe

LEFT, RIGHT = 104, 26
TITLE_PX, SENTENCE_PX, LEGEND_PX, HEADER_PX = 40, 78, 34, 30
MAP_PX, ROW_MIN, ROW_MAX = 400, 19, 56
SENT_HEADING_PX, SENT_PX = 30, 56
SECONDS_EACH = 2.0


def _sentence(number: int, scene: CollectiveFrame, of: int) -> str:
    return sentence_of(number, of, scene.label, scene.text)


def _sent_bars(run: CollectiveRun, grid: RingGrid, scene: CollectiveFrame) -> go.Bar:
    text = [str(n) for n in scene.sent]
    return go.Bar(x=[left + 0.5 for left in grid.lefts], y=list(scene.sent), text=text, xaxis="x", yaxis="y3")


def moving_figure(run: CollectiveRun, reel: Sequence[CollectiveFrame], title: str) -> go.Figure:
    """Cells and arrows, the sentence above them, what each rank has sent below, and what moves them."""
    grid = RingGrid(run)
    used = used_cells(grid, reel)
    row_px = min(max(MAP_PX / grid.height, ROW_MIN), ROW_MAX)
    map_px = row_px * grid.height
    plot_px = SENTENCE_PX + HEADER_PX + map_px + SENT_HEADING_PX + SENT_PX
    bottom_px = SLIDER_PX + BUTTONS_PX + LEGEND_PX
    height_px = TITLE_PX + plot_px + bottom_px
    top = 1 - (SENTENCE_PX + HEADER_PX) / plot_px
    bottom = (SENT_HEADING_PX + SENT_PX) / plot_px
    figure = go.Figure()
    figure.add_traces(styled(grid, list(moving_traces(grid, reel[0], used, "x", "y")), used, small=False))
    figure.add_trace(words_of(_sentence(0, reel[0], len(reel))))
    bars = _sent_bars(run, grid, reel[0])
    bars.update(width=0.6, marker={"color": theme.COPY.color, "line": {"width": 0}}, textposition="outside",
                textfont={"size": 11}, hoverinfo="skip", showlegend=False, cliponaxis=False)  # fmt: skip
    figure.add_trace(bars)
    changing = list(range(len(figure.data)))
    figure.add_traces(list(legend_traces(run, used)))
    most = max(max(reel[-1].sent, default=0), run.sent_by_formula, 1)
    names = row_names(run)
    edge = GAP * 0.9 + 0.05
    figure.update_layout(
        template=theme.LIGHT, height=round(height_px), barmode="overlay", bargap=0, dragmode=False,
        margin={"l": LEFT, "r": RIGHT, "t": TITLE_PX, "b": bottom_px, "autoexpand": False},
        title=title_of(title, height_px),
        legend=legend_at(height_px), meta={"below_px": SLIDER_PX + BUTTONS_PX},
        xaxis={"range": [-edge, grid.width + edge], "domain": [0, 1], "visible": False, "fixedrange": True,
               "anchor": "y"},
        yaxis={"range": [grid.height + 0.1, -0.1], "domain": [bottom, top], "fixedrange": True, "showgrid": False,
               "tickvals": [t + 0.5 for t in grid.tops], "ticktext": names, "tickfont": {"size": 12}},
        **words_axes(1 - SENTENCE_PX / plot_px),
        yaxis3={"range": [0, most * 1.12], "domain": [0, SENT_PX / plot_px], "fixedrange": True, "anchor": "x",
                "showgrid": False, "tickvals": [0, run.sent_by_formula], "ticktext": ["0", f"{run.sent_by_formula:g}"]},
    )  # fmt: skip
    notes = [
        {"xref": "x", "yref": "paper", "x": left + 0.5, "y": top, "yanchor": "bottom", "showarrow": False, "yshift": 2,
         "text": f"<b>rank {rank}</b>" if grid.few else f"<b>{rank}</b>", "font": {"size": 13}}
        for rank, left in enumerate(grid.lefts)
    ]  # fmt: skip
    figure.update_layout(annotations=notes)
    sent = f"numbers each rank has sent; dashed: {formula(run)} = {run.sent_by_formula:g}, S = {run.message}"
    figure.add_annotation(
        xref="paper", yref="paper", x=0, y=SENT_PX / plot_px, xanchor="left", yanchor="bottom", yshift=2,
        showarrow=False, text=sent,
        font={"size": 11}, opacity=theme.MUTED_OPACITY,
    )  # fmt: skip
    figure.add_shape(
        type="line", xref="paper", yref="y3", x0=0, x1=1, y0=run.sent_by_formula, y1=run.sent_by_formula,
        line={"color": "#D55E00", "width": 1.5, "dash": "dash"},
    )  # fmt: skip
    if len(reel) > 1:
        frames = [
            [
                *moving_traces(grid, scene, used, "x", "y"),
                go.Scatter(text=[_sentence(k, scene, len(reel))]),
                _sent_bars(run, grid, scene),
            ]
            for k, scene in enumerate(reel)
        ]
        add_player(figure, frames, changing, [scene.label for scene in reel], seconds_each=SECONDS_EACH)
    return figure


def film_strip(run: CollectiveRun, reel: Sequence[CollectiveFrame], title: str) -> go.Figure:
    """The beginning and the steps, up to eight, as small pictures."""
    ends = [scene for scene in reel if scene.arrived or scene is reel[0]]
    count = min(len(ends), 8)
    panels = [ends[round(k * (len(ends) - 1) / max(count - 1, 1))] for k in range(count)]
    grid = RingGrid(run)
    used = used_cells(grid, panels)
    across = min(4, count)
    down = -(-count // across)
    caption_px, header_px, gap_px, left_px = 84, 16, 12, 66
    map_px = min(max(190 / grid.height, 9), 30) * grid.height
    panel_px = caption_px + header_px + map_px + gap_px
    plot_px = panel_px * down
    top_px, bottom_px = 40 + 40, 10
    height_px = top_px + plot_px + bottom_px
    figure = go.Figure()
    figure.update_layout(
        template=theme.LIGHT, height=round(height_px), barmode="overlay", bargap=0,
        margin={"l": left_px, "r": 12, "t": top_px, "b": bottom_px, "autoexpand": False},
        title=title_of(title, height_px, size=17),
        legend=legend_at(height_px, top_px=40),
    )  # fmt: skip
    space = 0.03
    wide = (1 - space * (across - 1)) / across
    readable = run.ranks <= TWICE_UP_TO
    axes: dict[str, Any] = {}
    notes: list[dict[str, Any]] = []
    for number, scene in enumerate(panels):
        left = (number % across) * (wide + space)
        top = 1 - ((number // across) * panel_px + caption_px + header_px) / plot_px
        axis = "" if not number else str(number + 1)
        traces = list(moving_traces(grid, scene, used, f"x{axis}", f"y{axis}", numbers=readable, small=True))
        figure.add_traces(styled(grid, traces, used, small=True))
        axes[f"xaxis{axis}"] = {
            "range": [-0.1, grid.width + 0.1], "domain": [left, left + wide], "visible": False, "anchor": f"y{axis}",
        }  # fmt: skip
        axes[f"yaxis{axis}"] = {
            "range": [grid.height + 0.1, -0.1], "domain": [max(top - map_px / plot_px, 0), top], "showgrid": False,
            "anchor": f"x{axis}", "tickfont": {"size": 10}, "ticktext": row_names(run),
            "tickvals": [t + 0.5 for t in grid.tops] if number % across == 0 else [],
        }  # fmt: skip
        for rank, at in enumerate(grid.lefts):
            notes.append({
                "xref": f"x{axis}", "yref": "paper", "x": at + 0.5, "y": top, "yanchor": "bottom", "showarrow": False,
                "yshift": -2, "text": f"rank {rank}" if run.ranks <= 4 else str(rank), "font": {"size": 9},
                "opacity": theme.MUTED_OPACITY,
            })  # fmt: skip
        lines = textwrap.wrap(scene.text, 34, max_lines=4, placeholder=" ...")
        notes.append({
            "xref": "paper", "yref": "paper", "x": left, "y": top, "xanchor": "left", "yanchor": "top",
            "showarrow": False, "align": "left", "yshift": caption_px + header_px - 4, "font": {"size": 10.5},
            "text": f"<b>{safe(scene.label)}</b><br>" + "<br>".join(map(safe, lines)),
        })  # fmt: skip
    figure.add_traces(list(legend_traces(run, used)))
    figure.update_layout(axes, annotations=notes)
    return figure
