"""The film strip of a shard map: its telling moments side by side, for places where nothing moves."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.timeline import Op, Phase, Timeline
from fsdp_sim.viz import theme
from fsdp_sim.viz.frames import legend_at, title_of
from fsdp_sim.viz.shard_maps.cast import cast_of
from fsdp_sim.viz.shard_maps.cells import CellState
from fsdp_sim.viz.shard_maps.grid import Grid, legend_traces, moving_traces, outline, style, used_kinds
from fsdp_sim.viz.shard_maps.scenes import ShardFrame, all_moments, scenes, stage
from fsdp_sim.viz.theme import safe

PANELS, ACROSS = 8, 4
RANKS, LINES = 4, 24
CAPTION_PX, CAPTION_CHARS, HEADER_PX, ROW_GAP_PX = 82, 34, 16, 14
MAP_PX, ROW_MIN, ROW_MAX = 190, 5, 16
TITLE_PX, LEGEND_PX, LEFT, RIGHT, BOTTOM = 40, 62, 66, 12, 10


def telling(reel: Sequence[ShardFrame], most: int = PANELS) -> list[ShardFrame]:
    """The scenes that say most: rest, gather, forward, reshard; gather, backward, reduction; the optimizer."""
    wanted: list[tuple[Op | None, Phase | None]] = [
        (None, None),
        (Op.ALL_GATHER, Phase.FORWARD),
        (Op.FWD, None),
        (Op.FREE, Phase.FORWARD),
        (Op.BWD, None),
        (Op.REDUCE_SCATTER, None),
        (Op.ALL_REDUCE, None),
        (Op.OPTIM, None),
        (Op.ALL_GATHER, Phase.OPTIMIZER),
    ]
    chosen: list[int] = []
    for op, phase in wanted:
        fitting = [k for k, s in enumerate(reel) if s.moment.op is op and (phase is None or s.moment.phase is phase)]
        inner = [k for k in fitting if reel[k].moment.holdings.get(reel[k].moment.band) is not None] or fitting
        if inner:
            chosen.append(inner[len(inner) // 2] if op is not None else inner[0])
    rest = [k for k in range(len(reel)) if k not in chosen]
    while len(chosen) < min(most, len(reel)) and rest:  # fill the widest gap
        gaps = sorted(chosen)
        far = max(rest, key=lambda k: min(abs(k - other) for other in gaps))
        chosen.append(far)
        rest.remove(far)
    return [reel[k] for k in sorted(chosen)[:most]]


def film_strip(
    timeline: Timeline,
    *,
    unit: str | None,
    step: int,
    ranks: Iterable[int] | None,
    columns: tuple[int, ...],
    title: str,
) -> go.Figure:
    """Up to eight moments as small maps, each with its sentence."""
    cast = cast_of(timeline)
    some = tuple(ranks)[: 2 * RANKS] if ranks is not None else None
    shown = stage(cast, some, unit, RANKS, LINES)
    reel = scenes(shown, all_moments(timeline, cast, step, shown.ranks))
    panels = telling(reel)
    grid = Grid(shown, columns)
    used = used_kinds(grid, panels)
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    map_px = min(max(MAP_PX / grid.height, ROW_MIN), ROW_MAX) * grid.height
    panel_px = CAPTION_PX + HEADER_PX + map_px + ROW_GAP_PX
    plot_px = panel_px * down
    height_px = TITLE_PX + LEGEND_PX + plot_px + BOTTOM
    figure = go.Figure()
    figure.update_layout(
        template=theme.LIGHT, height=round(height_px), barmode="overlay", bargap=0,
        margin={"l": LEFT, "r": RIGHT, "t": TITLE_PX + LEGEND_PX, "b": BOTTOM, "autoexpand": False},
        title=title_of(title, height_px, size=17),
        legend=legend_at(height_px, top_px=TITLE_PX),
    )  # fmt: skip
    axes: dict[str, Any] = {}
    notes: list[dict[str, Any]] = []
    gap = 0.022
    wide = (1 - gap * (across - 1)) / across
    for number, scene in enumerate(panels):
        at, row = number % across, number // across
        left = at * (wide + gap)
        top = 1 - (row * panel_px + CAPTION_PX + HEADER_PX) / plot_px
        bottom = max(top - map_px / plot_px, 0.0)
        axis = "" if not number else str(number + 1)
        _draw_panel(figure, axes, notes, grid, scene, used, axis, (left, left + wide), (bottom, top), names=at == 0)
        lines = textwrap.wrap(scene.text, CAPTION_CHARS, max_lines=5, placeholder=" ...")
        notes.append({
            "xref": "paper", "yref": "paper", "x": left, "y": top, "xanchor": "left", "yanchor": "top",
            "yshift": CAPTION_PX + HEADER_PX - 4, "showarrow": False, "align": "left", "font": {"size": 10.5},
            "text": f"<b>{number + 1}</b>  " + "<br>".join(map(safe, lines)),
        })  # fmt: skip
    figure.add_traces(list(legend_traces(used)))
    figure.update_layout(axes, annotations=notes)
    return figure


def _draw_panel(
    figure: go.Figure,
    axes: dict[str, Any],
    notes: list[dict[str, Any]],
    grid: Grid,
    scene: ShardFrame,
    used: Sequence[CellState],
    axis: str,
    across: tuple[float, float],
    down: tuple[float, float],
    *,
    names: bool,
) -> None:
    x, y = f"x{axis}", f"y{axis}"
    traces = style(grid, list(moving_traces(grid, scene, used, x, y)), used)
    traces[0].update(xgap=1, ygap=1, hovertext=None, hoverinfo="skip")
    traces[-1].update(line={"width": 2})
    figure.add_traces([*traces, outline(grid, x, y, 1.2)])
    ticks = {
        "tickvals": [(top + bottom) / 2 for top, bottom in grid.spans.values()] if names else [],
        "ticktext": [safe(name[-9:]) if name else "⋮" for name in grid.spans],
        "tickfont": {"size": 10},
    }
    axes[f"xaxis{axis}"] = {
        "range": [-0.45, grid.width + 0.45], "domain": across, "visible": False, "anchor": y
    }  # fmt: skip
    axes[f"yaxis{axis}"] = {
        "range": [grid.height + 0.35, -0.35], "domain": down, "showgrid": False, "anchor": x, **ticks
    }  # fmt: skip
    for left, rank in zip(grid.lefts, grid.stage.ranks, strict=True):
        notes.append({
            "xref": x, "yref": "paper", "x": left + len(grid.columns) / 2, "y": down[1], "yanchor": "bottom",
            "yshift": -3, "showarrow": False, "text": f"rank {rank}", "font": {"size": 9},
            "opacity": theme.MUTED_OPACITY,
        })  # fmt: skip
