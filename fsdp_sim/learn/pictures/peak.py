"""How many bytes are alive, moment by moment, beside the least that there can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe
from fsdp_sim.words import byte_unit, human_bytes

PLOT_PX = 300


def histories(named: Mapping[str, Sequence[float]], sentence: str, *, least: float) -> Picture:
    """Steps from allocation to allocation, each line with a ring at its peak, and a level line at a lower bound.

    Args:
        named: a name, and the bytes alive after each allocation and release.
        sentence: the headline.
        least: bytes that no program can do without.
    """
    peaks = {name: max(history) for name, history in named.items()}
    size, unit = byte_unit(max(peaks.values()))
    figure, top = go.Figure(), 1.12 * max(peaks.values()) / size
    for number, (name, history) in enumerate(named.items()):
        look, values = chart.series(number), [n_bytes / size for n_bytes in history]
        x = [place / max(len(values) - 1, 1) for place in range(len(values))]
        line: dict[str, Any] = {"color": look.color, "width": 2, "dash": look.dash, "shape": "hv"}
        figure.add_trace(go.Scatter(x=x, y=values, name=safe(name), mode="lines", line=line, hovertemplate="%{y:.2f}"))
        at = values.index(max(values))
        marker = {"symbol": f"{look.symbol}-open", "size": 12, "color": look.color, "line": {"width": 2.5}}
        figure.add_trace(go.Scatter(x=[x[at]], y=[values[at]], mode="markers", marker=marker, showlegend=False))
    bound: dict[str, Any] = {"color": theme.LIMIT, "width": 2, "dash": "dash"}
    name = f"the least possible, {human_bytes(least)}"
    figure.add_trace(go.Scatter(x=[0, 1], y=[least / size] * 2, name=name, mode="lines", line=bound, hoverinfo="skip"))
    figure.update_layout(
        xaxis={"range": [0, 1], "tickvals": [], "title": {"text": "one step, allocation by allocation", "standoff": 6}},
        yaxis={"range": [0, top], "title": {"text": f"{unit} alive on rank 0", "standoff": 6}, "fixedrange": True},
    )
    chart.frame(figure, sentence, plot_px=PLOT_PX, above=44)
    corner = {"x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top"}
    y = 1 - (figure.layout.margin.t - 46) / figure.layout.height
    figure.update_layout(legend=corner | {"y": y, "orientation": "h"})
    rows = [(name, human_bytes(peak), f"{peak / least:.2f}") for name, peak in peaks.items()]
    text = "; ".join(f"{name} holds at most {human_bytes(peak)}" for name, peak in peaks.items())
    table = Table("The peaks", ("", "most alive", "times the least possible"), tuple(rows))
    return Picture(figure, f"{sentence}. {text}; the least possible is {human_bytes(least)}.", (table,))
