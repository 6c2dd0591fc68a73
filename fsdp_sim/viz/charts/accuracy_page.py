"""The figures of the accuracy page, which `fsdp-sim validate --report` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fsdp_sim.validate import HeldOut, PredictedRow
from fsdp_sim.viz.charts.accuracy_scatter import accuracy

# Okabe and Ito's colours
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C959F", "#1A1A1A")
INK, GRID = "#1A1A1A", "#E6EAEE"
SIZE = {"width": 900, "height": 520}


def accuracy_figures(
    held: Sequence[HeldOut], others: Sequence[PredictedRow], means: Mapping[str, float]
) -> dict[str, go.Figure]:
    """The page's figures, by the names of their files.

    Args:
        held: each model, predicted by numbers that were fitted without it.
        others: the rows to which nothing is fitted.
        means: the mean absolute error of each predictor, by its name.
    """
    return {
        "held_out": accuracy([*held, *others]).figure,
        "errors": error_of_each_row(held),
        "simpler": compared_with_simpler(means),
    }


def _figure(title: str, x: str, y: str) -> go.Figure:
    axis = {"gridcolor": GRID, "zeroline": False, "ticks": "", "title": {"standoff": 8}}
    return go.Figure(
        layout={
            "title": {"text": title, "x": 0.02, "font": {"size": 18}},
            "font": {"family": "Liberation Sans, Arial, sans-serif", "color": INK, "size": 13},
            "plot_bgcolor": "white",
            "paper_bgcolor": "white",
            "margin": {"l": 70, "r": 20, "t": 60, "b": 60},
            "xaxis": axis | {"title": {"text": x}},
            "yaxis": axis | {"title": {"text": y}},
            **SIZE,
        }
    )


def error_of_each_row(held: Sequence[HeldOut]) -> go.Figure:
    """One dot a row, by model: where the simulator is wrong, and which way."""
    figure = _figure("Error of every row, its model left out of the fit", "model", "predicted over measured, less 1")
    gpus = sorted({row.cluster.gpu.name for h in held for row in h.rows})
    order = [h.group for h in held]
    for g, (colour, gpu) in enumerate(zip(COLOURS, gpus, strict=False)):
        x, y = [], []
        for h in held:
            mine = [(row, e) for row, e in zip(h.rows, h.errors, strict=True) if row.cluster.gpu.name == gpu]
            for n, (_, error) in enumerate(mine):
                x.append(order.index(h.group) + (g - 1) * 0.25 + 0.18 * (n / max(1, len(mine) - 1) - 0.5))
                y.append(error)
        marker = {"color": colour, "size": 6, "opacity": 0.8}
        figure.add_scatter(x=x, y=y, mode="markers", name=gpu, marker=marker)
    figure.add_hrect(y0=-0.05, y1=0.05, fillcolor="#F5F7F9", line_width=0, layer="below")
    figure.add_hline(y=0, line={"color": "#8C959F", "width": 1})
    figure.update_xaxes(tickvals=list(range(len(order))), ticktext=order)
    figure.update_yaxes(tickformat="+.0%")
    legend = {"orientation": "h", "x": 1, "y": 1.02, "yanchor": "bottom", "xanchor": "right"}
    figure.update_layout(legend=legend, title={"y": 0.97})
    return figure


def compared_with_simpler(means: Mapping[str, float]) -> go.Figure:
    """Mean absolute error of several predictors."""
    figure = _figure("Mean absolute error, one model left out at a time", "", "")
    names = list(means)[::-1]
    values = [means[n] for n in names]
    colours = [COLOURS[0] if "simulator" in n else "#8C959F" for n in names]
    text = [f"{v:.1%}" for v in values]
    figure.add_bar(x=values, y=names, orientation="h", marker={"color": colours}, text=text, textposition="outside")
    figure.update_xaxes(tickformat=".0%", range=[0, max(values) * 1.15])
    figure.update_layout(height=260, margin={"l": 330}, showlegend=False)
    return figure
