"""Where everything in a timeline figure lies: panels from the top down, a row per rank and lane, title and legends."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.timeline import Lane
from fsdp_sim.viz import theme
from fsdp_sim.viz.summary import StepView
from fsdp_sim.viz.theme import human_bytes, human_ms, safe

# Pixels. The height of a figure is the sum of its parts, so a lane never gets thinner than its label.
LEFT, RIGHT, BOTTOM, LEGEND, TITLE_LINE = 138, 24, 100, 52, 24
HEADING, MEMORY_HEADING, PANEL_GAP = 28, 24, 12
ALL_LANES, LANE_MIN, LANE_MAX, MEMORY, MEMORY_OF_SEVERAL = 480, 20, 30, 120, 84
THIN = {Lane.AG_COPY_IN: 0.5}  # height of a row in lanes; 1 when not named
RANK_GAP = 0.45


@dataclass
class Panel:
    """One timeline of the figure: its rows, counted in lanes from the top, and its axes."""

    view: StepView
    memory_rank: int
    rows: dict[tuple[int, Lane], float] = field(default_factory=dict)  # (rank, lane) -> centre of the row
    bands: list[tuple[float, float]] = field(default_factory=list)  # top and bottom of each rank
    lanes: float = 0.0  # total height
    lanes_axis: str = ""
    memory_axis: str = ""  # empty when no memory was recorded

    def __post_init__(self) -> None:
        for rank in self.view.ranks:
            used = {e.lane for e in self.view.ops if e.rank == rank} | {Lane.COMPUTE}
            top = self.lanes = self.lanes + (RANK_GAP if self.rows else 0.0)
            for lane in (lane for lane in Lane if lane in used):
                height = THIN.get(lane, 1.0)
                self.rows[rank, lane] = self.lanes + height / 2
                self.lanes += height
            self.bands.append((top, self.lanes))


def headline(views: Sequence[StepView]) -> str:
    """One plain sentence: step time and exposed communication (the mean over all ranks) of each timeline."""
    if len(views) == 1:
        (view,) = views
        share = view.mean_exposed_s / view.step_s if view.step_s else 0.0
        exposed = f"{human_ms(view.mean_exposed_s)} ({share:.0%})"
        return f"A step takes {human_ms(view.step_s)}, of which {exposed} is exposed communication."
    told = [f"{v.name}: {human_ms(v.step_s)} a step, {human_ms(v.mean_exposed_s)} exposed communication" for v in views]
    sentence = "; ".join(told) + "."
    return sentence[0].upper() + sentence[1:]


def lay_out(figure: go.Figure, panels: list[Panel]) -> None:
    """Give each panel its axes, from the top down, and the figure its title, legends and height."""
    views = [panel.view for panel in panels]
    lane_px = min(max(ALL_LANES / sum(panel.lanes for panel in panels), LANE_MIN), LANE_MAX)
    memory_px = MEMORY if len(panels) == 1 else MEMORY_OF_SEVERAL
    spans: dict[str, tuple[float, float]] = {}  # axis -> its top and bottom in pixels from the top of the plot
    end_px = float(-PANEL_GAP)
    for number, panel in enumerate(panels):
        panel.lanes_axis = f"y{2 * number + 1}" if number else "y"
        top_px = end_px + PANEL_GAP + HEADING
        end_px = top_px + panel.lanes * lane_px
        spans[panel.lanes_axis] = top_px, end_px
        if panel.view.live(panel.memory_rank)[1]:
            panel.memory_axis = f"y{2 * number + 2}"
            top_px = end_px + MEMORY_HEADING
            end_px = top_px + memory_px
            spans[panel.memory_axis] = top_px, end_px
    domains = {axis: [max(1 - bottom / end_px, 0.0), 1 - top / end_px] for axis, (top, bottom) in spans.items()}
    for panel in panels:
        _draw_lanes_axis(figure, panel, domains[panel.lanes_axis])
        if panel.memory_axis:
            _draw_memory_axis(figure, panel, domains[panel.memory_axis])
    last_axis = panels[-1].memory_axis or panels[-1].lanes_axis
    span_ms = max(view.step_s for view in views) * 1e3
    figure.update_xaxes(range=[0, span_ms * 1.01 or 1.0], anchor=last_axis, minallowed=0)
    note = "milliseconds since the step began; a number in a bar is the number of its block"
    _write(figure, note, muted=True, x=0.5, y=0, xanchor="center", yanchor="top", yshift=-25)
    _draw_frame(figure, headline(views), end_px)


def _draw_lanes_axis(figure: go.Figure, panel: Panel, domain: list[float]) -> None:
    view, axis = panel.view, panel.lanes_axis
    named = [(rank, lane) for rank, lane in panel.rows if lane not in THIN]
    figure.layout[_layout_key(axis)] = {
        "domain": domain,
        "range": [panel.lanes, 0],
        "fixedrange": True,
        "showgrid": False,
        "tickvals": [panel.rows[row] for row in named],
        "ticktext": [
            f"<b>rank {rank}</b> · {theme.LANE_NAMES[lane]}" if lane is Lane.COMPUTE else theme.LANE_NAMES[lane]
            for rank, lane in named
        ],
    }
    for top, bottom in panel.bands:
        band = {"xref": "paper", "x0": 0, "x1": 1, "yref": axis, "y0": top, "y1": bottom}
        figure.add_shape(band, type="rect", fillcolor=theme.BAND, line={"width": 0}, layer="below")
    end = {"x0": view.step_s * 1e3, "x1": view.step_s * 1e3, "yref": axis, "y0": 0, "y1": panel.lanes}
    figure.add_shape(end, type="line", line={"color": theme.SEPARATOR, "width": 1.5, "dash": "dot"})
    name = safe(textwrap.shorten(view.name, 56, placeholder="..."))
    _write(figure, f"<b>{name}</b> · step {view.step}, {human_ms(view.step_s)}", y=domain[1])


def _draw_memory_axis(figure: go.Figure, panel: Panel, domain: list[float]) -> None:
    peak = panel.view.peak_bytes(panel.memory_rank)
    size, unit = theme.byte_unit(peak)
    tick = next(t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if peak / size / t <= 4.5 or t == 1000)
    values = [n * tick for n in range(int(peak / size / tick) + 1)]
    figure.layout[_layout_key(panel.memory_axis)] = {
        "domain": domain,
        "range": [0, peak * 1.04],
        "fixedrange": True,
        "tickvals": [value * size for value in values],
        "ticktext": [f"{value} {unit}" if value else "0" for value in values],
    }
    text = f"live memory of rank {panel.memory_rank}, at most {human_bytes(peak)}"
    _write(figure, text, muted=True, y=domain[1])


def _draw_frame(figure: go.Figure, sentence: str, plot_px: float) -> None:
    """The title, a line for each timeline, the legend of operations below it, that of memory at the bottom."""
    lines = [line for clause in sentence.replace("; ", ";\n").splitlines() for line in textwrap.wrap(clause, 80)]
    legend_px = 22 + TITLE_LINE * len(lines)
    top_px = legend_px + LEGEND
    height_px = top_px + plot_px + BOTTOM
    title_px = 14 + (TITLE_LINE / 2 if len(lines) > 1 else 0)  # plotly.js 4 sets several lines half a line higher
    title = {"text": "<br>".join(map(safe, lines)), "font": {"size": 17, "weight": 600}, "pad": {"l": 2}}
    legend = {"orientation": "h", "font": {"size": 12}, "itemsizing": "constant", "tracegroupgap": 0}
    corner = {"x": 0, "xref": "container", "xanchor": "left", "yref": "container"}
    figure.update_layout(
        template=theme.LIGHT,
        height=round(height_px),
        barmode="overlay",
        hovermode="closest",
        uirevision="keep",  # a redrawn figure keeps its zoom
        margin={"l": LEFT, "r": RIGHT, "t": top_px, "b": BOTTOM, "autoexpand": False},
        title=title | corner | {"y": 1 - title_px / height_px, "yanchor": "top"},
        legend=legend | corner | {"y": 1 - legend_px / height_px, "yanchor": "top"},
        legend2=legend | corner | {"y": 6 / height_px, "yanchor": "bottom"},
        uniformtext={"minsize": 10, "mode": "hide"},  # names that do not fit appear when zoomed in
    )


def _write(figure: go.Figure, text: str, *, muted: bool = False, **place: Any) -> None:
    """A line of text, by default just above the place at the left."""
    above = {"x": 0, "xanchor": "left", "yanchor": "bottom", "yshift": 3}
    opacity = theme.MUTED_OPACITY if muted else 1.0
    figure.add_annotation(
        above | place, text=text, xref="paper", yref="paper", showarrow=False, font={"size": 12}, opacity=opacity
    )


def _layout_key(axis: str) -> str:
    return f"yaxis{axis[1:]}"
