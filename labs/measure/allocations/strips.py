"""Predicted memory over measured: two strips of the same colours, height and phases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fsdp_sim.timeline import Memory, Phase, Timeline
from fsdp_sim.viz import Picture, Table, chart
from fsdp_sim.viz.theme import MEMORY, hatch
from fsdp_sim.words import byte_unit, human_bytes
from labs.measure.allocations.series import at_peak

PANEL_PX = 190
PHASES = (Phase.FORWARD, Phase.BACKWARD)

Edges = list[tuple[Phase, float]]
"""Each forward and backward of a step with the second in which it begins; last, without a phase, the step's end."""


def memory_picture(predicted: Timeline, measured: Timeline, rank: int = 0) -> Picture:
    """The bytes alive by category, predicted over measured.

    A step that is counted takes its own time. So the axis is no time: each forward, and each backward with all that
    follows it, is as wide as the next, and within it events stand where they came in their own time.

    Args:
        predicted: as `fsdp_sim.Simulation.timeline`; its last step is shown.
        measured: as `labs.measure.allocations.series.StepMemory.timeline`.
        rank: whose memory was measured; the prediction is that of rank 0, which stands for all.

    Raises:
        ValueError: one of them has no memory of its rank, or they have not the same phases.
    """
    shown = {"predicted": (predicted, 0), "measured": (measured, rank)}
    peaks = {name: at_peak(timeline, of) for name, (timeline, of) in shown.items()}
    edges = {name: _edges(timeline, of) for name, (timeline, of) in shown.items()}
    phases = [phase for phase, _ in edges["predicted"]][:-1]
    if (found := [phase for phase, _ in edges["measured"]][:-1]) != phases:
        raise ValueError(
            f"predicted has the phases {', '.join(phases)}, measured {', '.join(found)}; "
            "give both as many micro-batches"
        )
    n_bytes = {name: sum(peak.values()) for name, peak in peaks.items()}
    size, unit = byte_unit(max(n_bytes.values()))
    titles = [f"{name}: peak {human_bytes(most)}" for name, most in n_bytes.items()]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.13, subplot_titles=titles)
    named: set[str] = set()
    for row, (name, (timeline, of)) in enumerate(shown.items(), start=1):
        for area in _areas(timeline, of, edges[name], size):
            figure.add_trace(area.update(showlegend=area.name not in named), row=row, col=1)
            named.add(area.name)
    sentence = f"At its peak a step holds {human_bytes(n_bytes['measured'])}, {_sentence(n_bytes)}"
    chart.frame(figure, sentence, plot_px=2 * PANEL_PX, above=34, bottom=110)
    figure.update_layout(
        legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom", "traceorder": "normal"}
    )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    figure.update_yaxes(range=[0, 1.08 * max(n_bytes.values()) / size], ticksuffix=f" {unit}", nticks=5)
    figure.update_xaxes(
        range=[0, len(phases)], showgrid=False, tickvals=[n + 0.5 for n in range(len(phases))], ticktext=phases
    )
    for edge in range(1, len(phases)):
        figure.add_vline(edge, line={"width": 1, "dash": "dot", "color": "#57606A"})
    return Picture(figure, f"{sentence}.", (_table(peaks),))


def _edges(timeline: Timeline, rank: int) -> Edges:
    mine = [event for event in timeline if event.rank == rank and event.step == timeline.steps[-1]]
    found: Edges = []
    for event in mine:
        if event.phase in PHASES and not event.is_memory and (not found or found[-1][0] is not event.phase):
            found.append((event.phase, event.start_s))
    return [*found, (Phase.NONE, max(event.end_s for event in mine))]


def _areas(timeline: Timeline, rank: int, edges: Edges, size: float) -> list[go.Scatter]:
    """A curve for each category, from bottom to top; what came before the step is there when it begins."""
    times_s, live = timeline.live_bytes(rank)
    x = np.interp(times_s, [at_s for _, at_s in edges], range(len(edges)))
    last = np.flatnonzero(np.diff(x, append=np.inf))  # of the changes at one moment
    kinds = {MEMORY[category]: n_bytes[last] / size for category, n_bytes in live.items()}
    return [
        go.Scatter(
            x=x[last], y=y, name=kind.name, legendgroup=kind.name, stackgroup="all", mode="lines",
            line={"shape": "hv", "width": 0}, fillcolor=kind.color, fillpattern=hatch(kind) | {"bgcolor": kind.color},
            hovertemplate="%{y:.2f}",
        )
        for kind, y in kinds.items()
    ]  # fmt: skip


def _sentence(n_bytes: Mapping[str, int]) -> str:
    off = n_bytes["predicted"] / n_bytes["measured"] - 1
    if abs(off) < 0.005:
        return "as predicted"
    return f"{abs(off):.1%} {'less' if off > 0 else 'more'} than predicted"


def _table(peaks: Mapping[str, Mapping[Memory, int]]) -> Table:
    there = [category for category in Memory if any(category in peak for peak in peaks.values())]
    rows = [
        (MEMORY[category].name, *(human_bytes(peak[category]) if category in peak else "" for peak in peaks.values()))
        for category in there
    ]
    return Table("alive at the peak", ("what", *peaks), tuple(rows))
