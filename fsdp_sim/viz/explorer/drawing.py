"""The explorer's figure: a fixed set of traces, made once; a move changes nothing but their numbers.

What plotly.js spends on a move grows with the bars: hatching them one by one costs as much again, a legend a fifth. So
one path over all that are communication carries the hatching, copies that are shorter than a pixel are left out until
one zooms in, and the legend is not plotly's (`legend_html`).
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fsdp_sim.timeline import Lane, Memory
from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer.scene import KIND_ORDER, PIXELS, Bars, Scene
from fsdp_sim.viz.theme import MEMORY, Kind
from fsdp_sim.words import human_bytes

Change = dict[str, Any]  # properties of one trace
THIN = {Lane.AG_COPY_IN: 0.5}  # height of a row, where it is not 1
BAR = 0.9  # of the height of its row
CATEGORIES = [category for category in MEMORY if category is not Memory.NONE]
SHORT = {theme.COPY, theme.CAST}  # kinds most of whose bars are too short to be seen
NEIGHBOURS = {theme.FORWARD, theme.BACKWARD, theme.RECOMPUTE}  # kinds whose bars follow each other without a gap
NEAR = 0.35  # of the limit: a peak above that is drawn with the limit in view
SEAM = "rgba(255,255,255,0.75)"
LIMIT = "#D55E00"
GIB = 2**30
# Where a bar has a base, plotly's x is its end; its length is brought along.
_WHEN = "%{customdata:.3f} ms<br>%{base:,.3f} to %{x:,.3f} ms"


def rows_of(lanes: tuple[Lane, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Of each lane the centre and the height of its row, and how high all of them are."""
    heights = np.array([THIN.get(lane, 1.0) for lane in lanes])
    ends = np.cumsum(heights)
    return ends - heights / 2, heights, float(ends[-1])


def lane_traces(axis: str = "y") -> list[Any]:
    """Empty traces for the lanes of a rank, in the order of `lane_changes`."""
    exposed = _bar(theme.EXPOSED, axis)
    exposed.marker.line = {"width": 1, "color": theme.EXPOSED.text_color}
    exposed.hovertemplate = f"<b>exposed communication</b>, {_WHEN}<extra></extra>"
    hatch = theme.hatch(theme.ALL_GATHER) | {"fillmode": "replace", "bgcolor": "rgba(0,0,0,0)"}
    quiet = {"mode": "lines", "hoverinfo": "skip", "showlegend": False, "yaxis": axis, "visible": False}
    hatching = go.Scatter(
        name="hatching", fill="toself", line={"width": 0, "simplify": False}, fillpattern=hatch, **quiet
    )
    return [exposed, *(_bar(kind, axis) for kind in KIND_ORDER), hatching]


def memory_traces() -> list[Any]:
    """Empty traces for the live memory, in the order of `memory_changes`."""
    limit = go.Scatter(
        name="the device's limit", mode="lines", line={"color": LIMIT, "width": 2, "dash": "dash"}, yaxis="y2",
        legend="legend2", hovertemplate="the device's limit: %{y:.1f} GiB<extra></extra>", visible=False,
    )  # fmt: skip
    return [*(_area(category) for category in CATEGORIES), limit]


def _bar(kind: Kind, axis: str) -> go.Bar:
    return go.Bar(
        name=kind.name, orientation="h", textposition="none", cliponaxis=True, yaxis=axis, visible=False,
        marker={"color": kind.color, "line": {"width": 0.7 if kind in NEIGHBOURS else 0, "color": SEAM}},
        unselected={"marker": {"opacity": 0.22}},
        hovertemplate=f"<b>{kind.name} %{{hovertext}}</b>, {_WHEN}<br>%{{text:.4~g}} MiB<extra></extra>",
    )  # fmt: skip


def _area(category: Memory) -> go.Scatter:
    kind = MEMORY[category]
    area = go.Scatter(
        name=kind.name, mode="lines", line={"shape": "hv", "width": 0}, fillcolor=kind.color, visible=False,
        fill="tozeroy" if category is CATEGORIES[0] else "tonexty", yaxis="y2", legend="legend2",
        hovertemplate=f"<b>{kind.name}</b>, %{{customdata:.2f}} GiB at %{{x:.2f}} ms<extra></extra>",
    )  # fmt: skip
    if kind.hatched:
        area.fillpattern = theme.hatch(kind) | {"bgcolor": kind.color}
    return area


def lane_changes(seen: Scene, window: tuple[float, float], lit: Iterable[int] | None = None) -> list[Change]:
    """For each of `lane_traces` the properties that show a scene.

    Args:
        window: the milliseconds in view.
        lit: the operations that stay bright while all others fade; None for all.
    """
    centres, heights, _ = rows_of(seen.lanes)
    row, spans = seen.lanes.index(Lane.COMPUTE), seen.exposed
    lengths = _f(spans[:, 1] - spans[:, 0])
    found: list[Change] = [
        {
            "base": _f(spans[:, 0]), "x": lengths, "customdata": lengths, "y": np.full(len(spans), centres[row], "f4"),
            "width": BAR * heights[row], "visible": len(spans) > 0, "selectedpoints": None if lit is None else [],
        }
    ]  # fmt: skip
    wanted = None if lit is None else np.array(sorted(lit), dtype=np.int32)
    shown = seen.bars_between(*window)
    outlines = []
    pixel = (window[1] - window[0]) / PIXELS
    for kind in KIND_ORDER:
        bars = shown.get(kind)
        if bars is None:
            found.append({"visible": False})
            continue
        if kind in SHORT:
            seen_at_all = bars.x > 0.6 * pixel
            if wanted is not None:
                seen_at_all |= np.isin(bars.ops, wanted)
            bars = _only(bars, seen_at_all)
        if not len(bars.ops):  # an empty trace that calls itself visible is corrected by the browser, with every move
            found.append({"visible": False})
            continue
        y, width = _f(centres[bars.rows]), _f(BAR * heights[bars.rows])
        same = len(width) > 0 and bool((width == width[0]).all())
        chosen = None if wanted is None else np.flatnonzero(np.isin(bars.ops, wanted)).tolist()
        found.append(
            {"base": bars.base, "x": bars.x, "y": y, "width": float(width[0]) if same else width,
             "customdata": bars.x, "hovertext": bars.names, "text": bars.mib, "selectedpoints": chosen,
             "visible": True}
        )  # fmt: skip
        if kind.hatched:
            outlines.append(_outlines(bars, y, width))
    return [*found, _path(outlines)]


def memory_changes(seen: Scene, window: tuple[float, float]) -> list[Change]:
    """For each of `memory_traces` the properties that show a scene."""
    times, live = seen.memory(*window)
    total = np.zeros(len(times), np.float32)
    found: list[Change] = []
    for category in CATEGORIES:
        if category in live:
            total = total + live[category]
            found.append({"x": times, "y": total, "customdata": live[category], "visible": True})
        else:
            found.append({"visible": False})
    limit = seen.limit_bytes / GIB
    found.append({"x": np.array([0, 1e9], "f4"), "y": np.array([limit, limit], "f4"), "visible": True})
    return found


def _f(values: NDArray[np.floating[Any]]) -> NDArray[np.float32]:
    return values.astype(np.float32)


def _outlines(bars: Bars, y: NDArray[np.float32], width: NDArray[np.float32]) -> NDArray[np.float32]:
    """Bars as one path, with a gap after each."""
    gap = np.full(len(y), np.nan, np.float32)
    left, right, top, bottom = bars.base, bars.base + bars.x, y - width / 2, y + width / 2
    xs = np.stack([left, right, right, left, left, gap], axis=1).ravel()
    return np.stack([xs, np.stack([top, top, bottom, bottom, top, gap], axis=1).ravel()])


def _only(bars: Bars, which: NDArray[np.bool_]) -> Bars:
    names = [name for name, keep in zip(bars.names, which.tolist(), strict=True) if keep]
    return Bars(bars.base[which], bars.x[which], bars.rows[which], bars.ops[which], names, bars.mib[which])


def _path(parts: list[NDArray[np.float32]]) -> Change:
    xs, ys = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0), np.float32)
    return {"x": xs, "y": ys, "visible": len(xs) > 0}


def limit_in_view(seen: Scene) -> bool:
    """Whether the peak comes near enough to the device's limit for an axis to show both."""
    return seen.peak_bytes > NEAR * seen.limit_bytes


def legend_html(seen: Scene) -> str:
    """What the colours of a scene mean, as HTML that takes its own colours from the page."""
    kinds = [kind for kind in KIND_ORDER if kind in seen.bars]
    if len(seen.exposed):
        kinds.append(theme.EXPOSED)
    lanes = [_swatch(kind) for kind in kinds]
    memory = [_swatch(MEMORY[category]) for category in CATEGORIES if category in seen.live]
    if not limit_in_view(seen):
        memory.append(
            f"<span style='opacity:.7'>the device's limit, {human_bytes(seen.limit_bytes)}, is far above</span>"
        )
    else:
        memory.append(
            f"<span style='white-space:nowrap'><span style='color:{LIMIT}'>╌╌</span> the device's limit</span>"
        )
    line = "display:flex;flex-wrap:wrap;gap:0 14px;font-size:12px;line-height:19px;padding-left:116px"
    return "".join(
        f"<div style='{line}'><span style='opacity:.7;width:56px;margin-left:-70px'>{name}</span>{''.join(parts)}</div>"
        for name, parts in (("lanes", lanes), ("memory", memory))
    )


def _swatch(kind: Kind) -> str:
    hatch = (
        f"repeating-linear-gradient(135deg,rgba(255,255,255,.55) 0 1.5px,{kind.color} 1.5px 5px)"
        if kind.hatched
        else kind.color
    )
    edge = f"outline:1px solid {theme.EXPOSED.text_color};" if kind is theme.EXPOSED else ""
    return (
        f"<span style='white-space:nowrap'><span style='display:inline-block;width:12px;height:12px;{edge}"
        f"vertical-align:-2px;background:{hatch}'></span> {escape(kind.name)}</span>"
    )
