"""Pictures of the chapter on numerics: values of several runs, step by step or token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from fsdp_sim.viz import Picture, Table, chart

PLOT_PX = 280


def curves(
    sentence: str,
    lines: Mapping[str, Sequence[float]],
    x: Sequence[float | str],
    *,
    x_title: str,
    y_title: str,
) -> Picture:
    """Several lines over the same points, told apart by colour, sign and dash.

    Args:
        sentence: what the picture shows.
        lines: by name, a value for each of ``x``.
    """
    figure = go.Figure()
    for number, (name, values) in enumerate(lines.items()):
        look = chart.series(number)
        figure.add_scatter(
            x=list(x), y=list(values), name=name, mode="lines+markers",
            line={"color": look.color, "dash": look.dash, "width": 2},
            marker={"color": look.color, "symbol": look.symbol, "size": 9},
        )  # fmt: skip
    chart.frame(figure, sentence, plot_px=PLOT_PX, bottom=96)
    figure.update_layout(
        showlegend=True, legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"}
    )
    figure.update_xaxes(title=x_title, tickvals=list(x))
    figure.update_yaxes(title=y_title, type="linear")
    cells = tuple((name, *(f"{value:.4g}" for value in values)) for name, values in lines.items())
    ends = "; ".join(f"{name}: from {values[0]:.4g} to {values[-1]:.4g}" for name, values in lines.items())
    return Picture(figure, f"{sentence}. {ends}.", (Table(y_title, (x_title, *map(str, x)), cells),))


def losses(
    curves: Mapping[str, tuple[int, Sequence[float]]], sentence: str, *, quantity: str = "loss", unit: str = "nats"
) -> Picture:
    """The losses of several trainings over their steps, or another quantity: the first as a line, the others as marks.

    Args:
        curves: by name the first step, and the value of it and of each that follows.
        sentence: the title; what is to be seen.
        unit: of the quantity; none where it has none.
    """
    figure = go.Figure()
    for number, (name, (first, values)) in enumerate(curves.items()):
        look = chart.series(number)
        figure.add_scatter(
            x=list(range(first, first + len(values))), y=list(values), name=name,
            mode="markers" if number else "lines", line={"color": look.color, "width": 2, "dash": look.dash},
            marker={"color": look.color, "symbol": look.symbol, "size": 10, "line": {"color": "white", "width": 1}},
        )  # fmt: skip
    chart.frame(figure, sentence, plot_px=260, bottom=90)
    figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"})
    figure.update_xaxes(title="step", dtick=1)
    figure.update_yaxes(title=f"{quantity} ({unit})" if unit else quantity)
    steps = sorted({first + i for first, values in curves.values() for i in range(len(values))})
    cells = tuple(
        (
            str(step),
            *(
                f"{values[step - first]:.4f}" if 0 <= step - first < len(values) else ""
                for first, values in curves.values()
            ),
        )
        for step in steps
    )
    return Picture(figure, f"{sentence}.", (Table(quantity, ("step", *curves), cells),))
