"""What a lab found as a picture: predicted bars over measured ones."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from fsdp_sim.viz import Picture, Table, chart
from labs.experiments.result import COLUMNS, ResultRow

BAR_PX = 46


def bars(rows: Sequence[ResultRow], quantity: str, sentence: str) -> Picture:
    """One quantity of all settings that have it, predicted and measured.

    Args:
        sentence: the title; what is to be seen.

    Raises:
        ValueError: no row has this quantity; says which there are.
    """
    shown = [row for row in rows if row.quantity == quantity]
    if not shown:
        there = ", ".join(dict.fromkeys(row.quantity for row in rows))
        raise ValueError(f"no row is about {quantity!r}; there are {there}")
    figure = go.Figure()
    for number, name in enumerate(("predicted", "measured")):
        look, values = chart.series(number), [getattr(row, name) for row in shown]
        pattern = {"shape": look.pattern, "fillmode": "overlay", "fgcolor": "white", "size": 6}
        figure.add_bar(
            x=values, y=[row.name for row in shown], name=name, orientation="h",
            marker={"color": look.color, "pattern": pattern},
            text=[None if value is None else f"{value:,.4g} {shown[0].unit}" for value in values],
            textposition="outside", cliponaxis=False,
        )  # fmt: skip
    most = max(value for row in shown for value in (row.predicted, row.measured) if value is not None)
    left = 24 + 8 * max(len(row.name) for row in shown)
    chart.frame(figure, sentence, plot_px=BAR_PX * len(shown) + 30, left=left, right=90, bottom=70)
    figure.update_layout(
        barmode="group", bargap=0.35, legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"}
    )
    figure.update_xaxes(title=f"{quantity} ({shown[0].unit})", range=[0, 1.05 * most])
    figure.update_yaxes(autorange="reversed")
    errors = [abs(row.error) for row in shown if row.error is not None]
    finding = f"{sentence}." + (f" The predictions are within {max(0.01, *errors):.0%}." if errors else "")
    return Picture(figure, finding, (Table(quantity, COLUMNS, tuple(row.cells for row in shown)),))
