"""The figure of a shard map that moves: sentence, map, memory of a rank, slider and buttons, legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.timeline import Memory
from fsdp_sim.viz import theme
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
from fsdp_sim.viz.shard_maps.cells import CellState
from fsdp_sim.viz.shard_maps.grid import (
    CELL_STYLES,
    COLUMNS,
    Grid,
    legend_traces,
    moving_traces,
    outline,
    style,
    used_kinds,
)
from fsdp_sim.viz.shard_maps.scenes import ShardFrame
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_bytes

LEFT, RIGHT = 104, 26
TITLE_PX, SENTENCE_PX, LEGEND_PX, HEADER_PX = 40, 78, 66, 46
MAP_PX, ROW_MIN, ROW_MAX = 430, 9, 26
MEMORY_HEADING_PX, MEMORY_PX = 30, 64
SECONDS_EACH = 2.2

KINDS_OF_MEMORY = (  # what the memory strip and the table tell apart
    ("parameter shards", (Memory.SHARDED,), CELL_STYLES[CellState.OWN].color),
    ("optimizer state", (Memory.OPTIMIZER,), CELL_STYLES[CellState.OPTIMIZER].color),
    ("gradient shards", (Memory.RS_OUTPUT,), CELL_STYLES[CellState.REDUCED].color),
    ("gathered parameters", (Memory.UNSHARDED, Memory.AG_OUTPUT), CELL_STYLES[CellState.GATHERED].color),
    ("whole gradients", (Memory.UNSHARDED_GRAD, Memory.RS_INPUT), CELL_STYLES[CellState.PARTIAL].color),
)


def _sentence(number: int, scene: ShardFrame, of: int) -> str:
    return sentence_of(number, of, scene.phase, scene.text)


def moving_figure(grid: Grid, reel: Sequence[ShardFrame], title: str) -> go.Figure:
    """The map, the sentence above it, the memory of a rank below it, and what moves them."""
    used = used_kinds(grid, reel)
    row_px = min(max(MAP_PX / grid.height, ROW_MIN), ROW_MAX)
    map_px = row_px * grid.height
    has_memory = any(sum(scene.moment.bytes.values()) for scene in reel)
    memory_px = MEMORY_HEADING_PX + MEMORY_PX if has_memory else 0
    plot_px = SENTENCE_PX + HEADER_PX + map_px + memory_px
    top_px, bottom_px = TITLE_PX, SLIDER_PX + BUTTONS_PX + LEGEND_PX
    height_px = top_px + plot_px + bottom_px
    map_top = 1 - (SENTENCE_PX + HEADER_PX) / plot_px
    map_bottom = 1 - (SENTENCE_PX + HEADER_PX + map_px) / plot_px

    figure = go.Figure()
    moving = style(grid, list(moving_traces(grid, reel[0], used)), used)
    figure.add_traces(moving)
    figure.add_trace(words_of(_sentence(0, reel[0], len(reel))))
    changing = list(range(len(figure.data)))
    if has_memory:
        figure.add_traces(list(_memory_areas(reel)))
        changing.append(len(figure.data))
        figure.add_trace(_cursor(reel, 0))
    figure.add_trace(outline(grid))
    figure.add_traces(list(legend_traces(used)))

    figure.update_layout(
        template=theme.LIGHT,
        height=round(height_px),
        barmode="overlay",
        bargap=0,
        margin={"l": LEFT, "r": RIGHT, "t": top_px, "b": bottom_px, "autoexpand": False},
        title=title_of(title, height_px),
        legend=legend_at(height_px),
        xaxis={"range": [-0.45, grid.width + 0.45], "domain": [0, 1], "visible": False, "fixedrange": True,
               "anchor": "y"},
        yaxis={"range": [grid.height + 0.35, -0.35], "domain": [map_bottom, map_top], "fixedrange": True,
               "showgrid": False, **_band_ticks(grid)},
        **words_axes(1 - SENTENCE_PX / plot_px),
        dragmode=False,
        meta={"below_px": SLIDER_PX + BUTTONS_PX},
    )  # fmt: skip
    figure.update_layout(annotations=_headers(grid, map_top))
    if has_memory:
        _lay_out_memory(figure, reel, MEMORY_PX / plot_px)

    frames = []
    for number, scene in enumerate(reel):
        traces = [*moving_traces(grid, scene, used), go.Scatter(text=[_sentence(number, scene, len(reel))])]
        frames.append([*traces, _cursor(reel, number)] if has_memory else traces)
    labels = [f"{number} of {len(reel)}, {scene.phase}" for number, scene in enumerate(reel, 1)]
    add_player(figure, frames, changing, labels, seconds_each=SECONDS_EACH)
    return figure


def _band_ticks(grid: Grid) -> dict[str, Any]:
    """Names of bands in the middle of each; where rows are segments, each row's."""
    ticks: dict[float, str] = {}
    for name, (top, bottom) in grid.spans.items():
        ticks[(top + bottom) / 2] = f"<b>{safe(_fitting(name))}</b>" if name else f"⋮ {len(grid.stage.hidden)} more"
    by_segment = [line for line in grid.lines if line.band and line.band.segment_bytes]
    for line in by_segment:
        ticks.pop(sum(grid.spans[line.band.name if line.band else ""]) / 2, None)
    for line in by_segment:
        ticks[line.top + 0.5] = safe(_fitting(line.label))
    return {"tickvals": list(ticks), "ticktext": list(ticks.values()), "tickfont": {"size": 12}}


def _fitting(name: str) -> str:
    return name if len(name) <= 14 else f"…{name[-13:]}"


def _headers(grid: Grid, top: float) -> list[dict[str, Any]]:
    """Names of ranks and of their columns, above the map; and of replicas."""
    stage, wide = grid.stage, len(grid.columns)
    few = len(stage.ranks) <= 4
    place = {"xref": "x", "yref": "paper", "y": top, "showarrow": False, "yanchor": "bottom"}
    muted = {"opacity": theme.MUTED_OPACITY}
    notes: list[dict[str, Any]] = []
    for left, rank in zip(grid.lefts, stage.ranks, strict=True):
        name = {"text": f"<b>rank {rank}</b>", "yshift": 13, "font": {"size": 13 if few else 12}}
        notes.append(place | name | {"x": left + wide / 2})
        for number, column in enumerate(grid.columns):
            letter = COLUMNS[column][0]
            text = {"text": COLUMNS[column] if few else letter, "yshift": -2, "font": {"size": 10}}
            text["name"] = f"narrow:{letter}"
            notes.append(place | muted | text | {"x": left + number + 0.5})
    if stage.cast.replicas > 1 and not stage.cast.keeps_whole and stage.cast.shards > 1:
        for group in dict.fromkeys(map(grid.group, stage.ranks)):
            inside = [left for left, rank in zip(grid.lefts, stage.ranks, strict=True) if grid.group(rank) == group]
            name = {"text": f"replica {group}", "yshift": 29, "font": {"size": 11}}
            notes.append(place | muted | name | {"x": (inside[0] + inside[-1] + wide) / 2})
    key = {
        "text": "" if few else "p, g, o",
        "hovertext": "parameters, gradients, optimizer state",
        "font": {"size": 10},
    }
    left_of = {"xref": "paper", "x": 0, "xanchor": "right", "yshift": -2, "xshift": -6, "name": "narrow:p, g, o"}
    return [*notes, place | muted | key | left_of]


def _memory_areas(reel: Sequence[ShardFrame]) -> Iterable[go.Scatter]:
    """A rank's memory after each moment, stacked."""
    for name, of, color in KINDS_OF_MEMORY:
        held = [sum(scene.moment.bytes.get(c, 0) for c in of) for scene in reel]
        if any(held):
            yield go.Scatter(
                x=[k - 0.5 for k in range(len(reel) + 1)], y=[*held, held[-1]], xaxis="x3", yaxis="y3",
                stackgroup="memory", mode="lines", line={"shape": "hv", "width": 0}, fillcolor=color, name=name,
                hoverinfo="text", showlegend=False,
                hovertext=[f"{name}: {human_bytes(n)}" for n in held],
            )  # fmt: skip


def _cursor(reel: Sequence[ShardFrame], number: int) -> go.Scatter:
    most = max(sum(scene.moment.bytes.values()) for scene in reel)
    return go.Scatter(
        x=[number, number], y=[0, most * 1.08], xaxis="x3", yaxis="y3", mode="lines", hoverinfo="skip",
        line={"color": "#D55E00", "width": 2.5}, showlegend=False,
    )  # fmt: skip


def _lay_out_memory(figure: go.Figure, reel: Sequence[ShardFrame], top: float) -> None:
    totals = [sum(scene.moment.bytes.values()) for scene in reel]
    most = max(totals)
    figure.update_layout(
        xaxis3={"range": [-0.5, len(reel) - 0.5], "domain": [0, 1], "visible": False, "fixedrange": True,
                "anchor": "y3"},
        yaxis3={"range": [0, most * 1.08], "domain": [0, top], "fixedrange": True, "anchor": "x3", "nticks": 3,
                "tickvals": [0, most], "ticktext": ["0", human_bytes(most)], "showgrid": False},
    )  # fmt: skip
    rank = next(iter(reel[0].by_rank))
    figure.add_annotation(
        xref="paper", yref="paper", x=0, y=top, xanchor="left", yanchor="bottom", showarrow=False, yshift=2,
        text=f"memory of rank {rank}: parameters, gradients, optimizer state", font={"size": 11},
        opacity=theme.MUTED_OPACITY,
    )  # fmt: skip
    starts = [k for k, scene in enumerate(reel) if not k or scene.phase != reel[k - 1].phase]
    for start in starts[1:]:
        figure.add_shape(
            type="line", xref="x3", yref="y3 domain", x0=start - 0.5, x1=start - 0.5, y0=0, y1=1.25,
            line={"color": theme.SEPARATOR, "width": 1, "dash": "dot"},
        )  # fmt: skip
