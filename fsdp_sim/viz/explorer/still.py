"""The explorer without a kernel: one plan as a picture that stands still."""

from __future__ import annotations

import plotly.graph_objects as go

from fsdp_sim.forms import FormState
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.viz import theme
from fsdp_sim.viz.explorer import figure_of, words
from fsdp_sim.viz.explorer.drawing import lane_changes, lane_traces, limit_in_view, memory_changes, memory_traces
from fsdp_sim.viz.explorer.layout_of import layout, needed_gib
from fsdp_sim.viz.explorer.scene import Scene
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import human_bytes, human_ms

LEGEND, LEGEND_BELOW, TITLE = 54, 62, 58  # pixels


def still(state: FormState, sim: Simulation, seen: Scene) -> Picture:
    """A plan as a picture: the figure with its legends, the words below, the numbers as a table."""
    return Picture(still_figure(state, sim, seen), words.finding(state, sim, sim.explain()), (numbers(state, sim),))


def still_figure(state: FormState, sim: Simulation, seen: Scene) -> go.Figure:
    """The figure of a scene, for places where nothing beside it says what it shows."""
    traces = [*lane_traces(), *memory_traces()]
    changes = [*lane_changes(seen, (0.0, seen.span_ms)), *memory_changes(seen, (0.0, seen.span_ms))]
    figure = figure_of.figure(traces, changes, layout(theme.LIGHT))
    if not limit_in_view(seen):
        figure.data[-1].visible = False
    top, extra = TITLE + LEGEND, TITLE + LEGEND + LEGEND_BELOW
    height = figure.layout.height + extra
    margin = figure.layout.margin
    corner = {
        "x": 0,
        "xref": "container",
        "xanchor": "left",
        "yref": "container",
        "orientation": "h",
        "font": {"size": 11},
    }
    figure.update_layout(
        height=height, showlegend=True, margin={"t": margin.t + top, "b": margin.b + LEGEND_BELOW},
        title={"text": f"{safe(heading(sim))}<br><sup>{safe(words.short(state.line, 130))}</sup>", "x": 0,
               "xref": "container", "xanchor": "left", "pad": {"l": 6}, "y": 1 - 18 / height, "yanchor": "top",
               "font": {"size": 16}},
        legend=corner | {"y": 1 - TITLE / height, "yanchor": "top"},
        legend2=corner | {"y": 4 / height, "yanchor": "bottom"},
        xaxis={"range": [0, seen.span_ms * 1.01 or 1.0]},
        yaxis=seen.places.axis(),
        yaxis2={"range": [0, needed_gib(seen) * 1.06]},
    )  # fmt: skip
    return figure


def heading(sim: Simulation) -> str:
    step, exposed = human_ms(sim.step_time_s), human_ms(sim.exposed_comm_s)
    fits = {Fit.FITS: "", Fit.EDGE: "; it is on the edge of memory"}.get(sim.fit, "; it does not fit")
    return f"A step takes {step}, {exposed} of it exposed communication; {human_bytes(sim.peak_memory_bytes)}{fits}"


def numbers(state: FormState, sim: Simulation) -> Table:
    """The numbers of a plan."""
    return Table(state.line, ("", "predicted"), tuple((name, text) for name, text, _ in words.quantities(sim)))
