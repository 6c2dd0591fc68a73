"""What crosses the link and what a step takes, FSDP beside HSDP, predicted beside measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from labs.experiments.result import COLUMNS, LabResult

if TYPE_CHECKING:
    from fsdp_sim.viz import Picture


def picture(result: LabResult) -> Picture:
    """Of a result of `labs.experiments.nodes.run`: bytes across the link on the left, a step's seconds on the right."""
    import plotly.graph_objects as go  # where it is drawn: ranks import this folder, too
    from plotly.subplots import make_subplots

    from fsdp_sim.viz import Picture, Table, chart

    quantities = (result.rows[0].quantity, result.rows[2].quantity)
    titles = [f"{quantity}, {unit}" for quantity, unit in zip(quantities, ("MiB", "ms"), strict=True)]
    figure = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    for column, quantity in enumerate(quantities, start=1):
        rows = [row for row in result.rows if row.quantity == quantity]
        for number, (word, values) in enumerate(
            {"predicted": [row.predicted for row in rows], "measured": [row.measured for row in rows]}.items()
        ):
            look = chart.series(number)
            pattern = {"shape": look.pattern, "fillmode": "overlay", "fgcolor": "#FFFFFF"}
            bars = go.Bar(
                x=[row.name.replace(", ", ",<br>").replace(" over", "<br>over") for row in rows],
                y=values,
                name=word,
                legendgroup=word,
                showlegend=column == 1,
                texttemplate="%{y:,.1f}" if column == 1 else "%{y:,.0f}",
                textposition="outside",
                cliponaxis=False,
                marker={"color": look.color, "pattern": pattern},
            )
            figure.add_trace(bars, 1, column)
    chart.frame(figure, finding(result), plot_px=250, bottom=88, above=52)
    figure.update_layout(legend={"orientation": "h", "y": -0.24, "x": 0.5, "xanchor": "center"})
    return Picture(figure, finding(result), (Table(result.caption, COLUMNS, tuple(row.cells for row in result.rows)),))


def finding(result: LabResult) -> str:
    """The two, in a sentence."""
    fsdp, _, fsdp_step, hsdp, _, hsdp_step = result.rows
    if not (fsdp.measured and hsdp.measured and fsdp_step.measured and hsdp_step.measured):
        assert fsdp.predicted
        assert hsdp.predicted
        return (
            f"Predicted: FSDP over all ranks sends {fsdp.predicted / hsdp.predicted:.1f} times as much over the link."
        )
    return (
        f"FSDP over all ranks sent {fsdp.measured / hsdp.measured:.1f} times as much over the link as HSDP, "
        f"and at the slow link a step took {fsdp_step.measured:,.0f} ms, with HSDP {hsdp_step.measured:,.0f} ms."
    )
