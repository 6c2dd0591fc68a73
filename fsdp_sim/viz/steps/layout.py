"""Where everything in a timeline figure lies: panels from the top down, a row per rank and lane, title and legends.

The height of a figure is the sum of its parts in pixels, so a lane never gets thinner than its label and nothing lies
on anything else; the width is that of the place it is shown in, at least `NARROWEST`.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_sim.timeline import Phase
from fsdp_sim.viz import theme
from fsdp_sim.viz.steps.memory_strip import Strip
from fsdp_sim.viz.steps.rows import rows_of
from fsdp_sim.viz.steps.step_view import PhaseSpan, StepView
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_bytes, human_ms

# Pixels.
NARROWEST = 848  # the output area of JupyterLab in a window of 1280
PHONE = 230  # the plot on a screen of 390
LEFT, RIGHT, TITLE_LINE, SUBTITLE_LINE = 138, 24, 23, 19
HEADING, PHASES, MEMORY_HEADING, PANEL_GAP, TIME_AXIS = 26, 24, 26, 14, 46
ALL_LANES, LANE_MIN, LANE_MAX, MEMORY, MEMORY_OF_SEVERAL = 480, 20, 30, 132, 84
LEGEND_ROW, LEGEND_SYMBOL, LETTER = 20, 44, 6.7
PHASE_KINDS = {Phase.FORWARD: theme.FORWARD, Phase.BACKWARD: theme.BACKWARD, Phase.OPTIMIZER: theme.OPTIMIZER}

SHORT_PHASES = {Phase.FORWARD: "fwd", Phase.BACKWARD: "bwd", Phase.OPTIMIZER: "opt"}

Layout = dict[str, Any]


@dataclass
class Panel:
    """One timeline of the figure: its rows and its axes."""

    view: StepView
    memory_rank: int
    lanes_axis: str = "y"
    memory_axis: str = ""  # empty when no memory was recorded
    traces: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])  # in the lanes, in the memory

    def __post_init__(self) -> None:
        self.strip = Strip(self.view, self.memory_rank)
        self.stretches = self.view.stretches(self.view.ranks[0])
        self.rows = rows_of(self.view.groups())


def lay_out(panels: Sequence[Panel], title: str, subtitle: Sequence[str]) -> Layout:
    """The layout of a figure: axes of each panel from the top down, phases, title, legends and height.

    Args:
        panels: with their traces, whose names are in the legends; they are told their axes.
        subtitle: lines below the title.
    """
    lane_px = min(max(ALL_LANES / sum(panel.rows.height for panel in panels), LANE_MIN), LANE_MAX)
    memory_px = MEMORY if len(panels) == 1 else MEMORY_OF_SEVERAL
    spans: dict[str, tuple[float, float]] = {}  # axis -> its top and bottom in pixels from the top of the plot
    end_px = float(-PANEL_GAP)
    for number, panel in enumerate(panels):
        panel.lanes_axis = f"y{2 * number + 1}" if number else "y"
        top_px = end_px + PANEL_GAP + HEADING + PHASES * bool(panel.stretches)
        end_px = top_px + panel.rows.height * lane_px
        spans[panel.lanes_axis] = top_px, end_px
        if panel.strip:
            panel.memory_axis = f"y{2 * number + 2}"
            top_px = end_px + MEMORY_HEADING
            end_px = top_px + memory_px
            spans[panel.memory_axis] = top_px, end_px
    span_ms = max(panel.view.step_s for panel in panels) * 1e3 * 1.01 or 1.0
    legends = [
        dict.fromkeys(t["name"] for panel in panels for t in panel.traces[n] if t.get("showlegend", True))
        for n in range(2)
    ]
    longest = max(len(re.sub("<.*?>", "", label)) for panel in panels for _, label in panel.rows.labels)
    left = round(max(LEFT, 18 + LETTER * longest))
    layout = _frame(title, subtitle, left, end_px, _rows(legends[0]), _rows(legends[1]))
    layout["xaxis"] = {
        "range": [0, span_ms],
        "minallowed": 0,
        "maxallowed": span_ms,
        "anchor": panels[-1].memory_axis or panels[-1].lanes_axis,
        "separatethousands": True,
        "exponentformat": "none",
        "tickformat": ",",
        "title": {"text": "milliseconds since the step began · a number in a bar is the number of its block",
                  "standoff": 6, "font": {"size": 11}},
    }  # fmt: skip
    for panel in panels:
        top_px, bottom_px = spans[panel.lanes_axis]
        layout[_key(panel.lanes_axis)] = (
            {"fixedrange": True, "showgrid": False}
            | panel.rows.axis()
            | {"domain": [1 - bottom_px / end_px, 1 - top_px / end_px]}
        )
        _write_lanes(layout, panel, lambda px: 1 - px / end_px, top_px)
        if panel.memory_axis:
            top_px, bottom_px = spans[panel.memory_axis]
            domain = [max(1 - bottom_px / end_px, 0.0), 1 - top_px / end_px]
            layout[_key(panel.memory_axis)] = panel.strip.axis() | {"domain": domain}
            _write_memory(layout, panel, domain[1])
    return layout


def _write_lanes(layout: Layout, panel: Panel, place: Any, top_px: float) -> None:
    """The tint behind each rank, the name of the timeline, its phases and the end of its step."""
    view, shapes = panel.view, layout["shapes"]
    for top, bottom in panel.rows.bands:
        band = {"xref": "paper", "x0": 0, "x1": 1, "yref": panel.lanes_axis, "y0": top, "y1": bottom}
        shapes.append(band | {"type": "rect", "fillcolor": theme.BAND, "line": {"width": 0}, "layer": "below"})
    end_ms = view.step_s * 1e3
    end = {"x0": end_ms, "x1": end_ms, "yref": panel.lanes_axis, "y0": 0, "y1": panel.rows.height}
    shapes.append(end | {"type": "line", "line": {"color": theme.SEPARATOR, "width": 1.5, "dash": "dot"}})
    name = safe(textwrap.shorten(view.name, 56, placeholder="..."))
    heading_px = top_px - PHASES * bool(panel.stretches)
    layout["annotations"].append(
        _text(f"<b>{name}</b> · step {view.step}, {human_ms(view.step_s)}", y=place(heading_px))
    )
    many = len({s.micro_batch for s in panel.stretches}) > 1
    span_ms = layout["xaxis"]["range"][1]
    for stretch in panel.stretches:
        _bracket(layout, stretch, many, span_ms, place(top_px - 4), place(top_px - 8))


def _bracket(layout: Layout, stretch: PhaseSpan, many: bool, span_ms: float, low: float, high: float) -> None:
    """A bracket over a phase, in the colour of its bars, with its name as long as there is room for it."""
    start_ms, end_ms = stretch.start_s * 1e3, stretch.end_s * 1e3
    inset = min(span_ms / 600, (end_ms - start_ms) / 4)
    left, right = start_ms + inset, end_ms - inset
    path = f"M{left:.6g},{low:.5f} L{left:.6g},{high:.5f} L{right:.6g},{high:.5f} L{right:.6g},{low:.5f}"
    line = {"color": PHASE_KINDS[stretch.phase].color, "width": 2}
    layout["shapes"].append({"type": "path", "path": path, "xref": "x", "yref": "paper", "line": line})
    name, number = str(stretch.phase), stretch.micro_batch + 1
    texts = [name, SHORT_PHASES[stretch.phase], ""]
    if many and stretch.phase is not Phase.OPTIMIZER:
        texts = [f"{name} of micro-batch {number}", f"{name} {number}", f"{name[0].upper()}{number}", ""]
    part = (end_ms - start_ms) / span_ms
    text, on_a_phone = (
        next(text for text in texts if len(text) * LETTER <= part * room) for room in (NARROWEST - LEFT - RIGHT, PHONE)
    )
    if text:
        place = {"xref": "x", "x": (left + right) / 2, "xanchor": "center", "y": high, "yshift": 0}
        layout["annotations"].append(_text(text, **place, font={"size": 11}, name=f"narrow:{on_a_phone}"))


def _write_memory(layout: Layout, panel: Panel, top: float) -> None:
    strip = panel.strip
    layout["annotations"].append(_text(strip.heading(), y=top))
    if strip.limit_is_drawn:
        at = strip.limit_bytes / strip.scale[0]
        line = {"xref": "paper", "x0": 0, "x1": 1, "yref": panel.memory_axis, "y0": at, "y1": at}
        layout["shapes"].append(line | {"type": "line", "line": {"color": theme.LIMIT, "width": 1.5, "dash": "dash"}})
        text = f"limit {human_bytes(strip.limit_bytes)}"
        layout["annotations"].append(
            _text(text, x=1, xanchor="right", yref=panel.memory_axis, y=at, yshift=0, font={"size": 11})
        )


def _rows(names: Iterable[str]) -> int:
    """How many rows a legend takes where the figure is narrow."""
    rows, used = 1, 0.0
    for name in names:
        width = LEGEND_SYMBOL + len(name) * LETTER
        rows, used = (rows + 1, width) if used + width > NARROWEST - 20 else (rows, used + width)
    return rows if used else 0


def _wrapped(text: str, most: int) -> list[str]:
    """Lines of about equal length, as few as there can be; a number stays with its unit."""
    text = re.sub(r"(\d) (ms|[KMGT]?i?B)\b", "\\1\u00a0\\2", text)
    lines = textwrap.wrap(text, most)
    while most > 20 and len(shorter := textwrap.wrap(text, most - 4)) == len(lines):
        lines, most = shorter, most - 4
    return lines


def _frame(
    title: str, subtitle: Sequence[str], left: int, plot_px: float, legend_rows: int, memory_rows: int
) -> Layout:
    """Title, subtitle and legend of operations above the plot, the legend of memory below it."""
    lines = [line for clause in title.replace("; ", ";\n").splitlines() for line in _wrapped(clause, 78)]
    sentences = [line for text in subtitle for line in _wrapped(text, 118)]
    title_px = 12 + TITLE_LINE * len(lines)
    legend_px = title_px + SUBTITLE_LINE * len(sentences) + 6
    top_px = legend_px + LEGEND_ROW * legend_rows + 4
    bottom_px = TIME_AXIS + LEGEND_ROW * memory_rows + 8
    height_px = top_px + plot_px + bottom_px
    first_px = 12 + (TITLE_LINE / 2) * (len(lines) - 1)  # plotly.js 4 sets several lines half a line higher each
    text = "<br>".join(map(safe, lines))
    corner = {"x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top"}
    legend = {"orientation": "h", "font": {"size": 12}, "itemsizing": "constant", "tracegroupgap": 0}
    below = _text(
        "<br>".join(map(safe, sentences)), y=1, yshift=top_px - title_px + 3, yanchor="top", font={"size": 13}
    )
    below |= {"xshift": 2 - left, "align": "left", "opacity": theme.MUTED_OPACITY, "name": "notes"}
    return {
        "template": theme.LIGHT,
        "height": math.ceil(height_px),
        "barmode": "overlay",
        "hovermode": "closest",
        "uirevision": "keep",  # a redrawn figure keeps its zoom
        "margin": {"l": left, "r": RIGHT, "t": top_px, "b": bottom_px, "autoexpand": False},
        "legend": legend | corner | {"y": 1 - legend_px / height_px},
        "legend2": legend | corner | {"y": (bottom_px - TIME_AXIS) / height_px},
        "uniformtext": {"minsize": 10, "mode": "hide"},  # names that do not fit appear when zoomed in
        "title": {"text": text, "font": {"size": 17, "weight": 600}, "pad": {"l": 4}}
        | corner
        | {"y": 1 - first_px / height_px},
        "shapes": [],
        "annotations": [below] if sentences else [],
        "meta": {"below_px": TIME_AXIS},
    }


def _text(text: str, **place: Any) -> Layout:
    """A line of text, by default just above the place at the left of the plot."""
    above = {"x": 0, "xref": "paper", "xanchor": "left", "yref": "paper", "yanchor": "bottom", "yshift": 3}
    return above | {"font": {"size": 12}, "showarrow": False, "text": text} | place


def _key(axis: str) -> str:
    return f"yaxis{axis[1:]}"
