"""What calls do today, what a knob costs, and where a decision falls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import plotly.graph_objects as go

from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe

PEAK = "GiB at the peak (dotted: the limit; hatched: does not fit)"
ROW_PX, BAR_PX, LETTER_PX, SIGN_PX = 30, 26, 6.6, 13
LABEL_SHARE = 0.3  # of the first bar's length: a number beside a bar takes less


class MarkStyle(NamedTuple):
    """How an outcome is marked: a sign and a colour."""

    symbol: str
    color: str


RUNS, WARNS, RAISES = MarkStyle("circle", "#009E73"), MarkStyle("diamond", "#E69F00"), MarkStyle("x", "#D55E00")
"""Of a call: it runs, it runs with a warning, it raises."""


def marks(cells: Mapping[str, Mapping[str, str]], looks: Mapping[str, MarkStyle], sentence: str) -> Picture:
    """A grid: in each cell a sign, and the words that say what it is.

    Args:
        cells: by row and column, an outcome, which may go on after a colon: ``"raises: TypeError"``. Columns that a
            row does not have stay empty.
        looks: of each outcome.
        sentence: the headline.
    """
    rows, columns = list(cells), list(dict.fromkeys(column for row in cells.values() for column in row))
    figure = go.Figure()
    for outcome, look in looks.items():
        found = [
            (columns.index(column), rows.index(row), text)
            for row, of in cells.items()
            for column, text in of.items()
            if text.partition(":")[0] == outcome
        ]
        figure.add_trace(
            go.Scatter(
                x=[x for x, _, _ in found], y=[y for _, y, _ in found], mode="markers+text", name=safe(outcome),
                marker={"symbol": look.symbol, "color": look.color, "size": SIGN_PX},
                text=[f"  {safe(text.partition(': ')[2] or outcome)}" for _, _, text in found],
                textposition="middle right", cliponaxis=False, hoverinfo="skip",
            )
        )  # fmt: skip
    named = any(columns)
    for x, column in enumerate(columns):
        chart.write(figure, f"<b>{safe(column)}</b>", x=x - 0.03, xref="x", y=1, yshift=4)
    figure.update_layout(
        showlegend=False,
        xaxis={"range": [-0.1, len(columns) - 0.05], "visible": False, "fixedrange": True},
        yaxis={
            "range": [len(rows) - 0.5, -0.5], "tickvals": list(range(len(rows))),
            "ticktext": [safe(row) for row in rows], "fixedrange": True,
        },
    )  # fmt: skip
    left = round(30 + LETTER_PX * max(map(len, rows)))
    chart.frame(figure, sentence, plot_px=ROW_PX * len(rows), left=left, above=30 if named else 12, bottom=20)
    outcomes = "; ".join(
        f"{row}: {', '.join(' '.join((c, t)).strip() for c, t in of.items())}" for row, of in cells.items()
    )
    table = Table("", ("", *columns), tuple((row, *(of.get(c, "") for c in columns)) for row, of in cells.items()))
    return Picture(figure, f"{sentence}. {outcomes}.", (table,))


def knobs(measures: Mapping[str, tuple[float, float]], sentence: str, *, base: str, limit_gib: float) -> Picture:
    """What each setting makes of a step: its time on the left, its peak memory on the right, against the first.

    Args:
        measures: by name of the setting, milliseconds and GiB.
        base: which of them the others differ from in one thing; drawn as dashed lines.
        limit_gib: what the GPU has.
    """
    figure, names = go.Figure(), list(measures)
    fits = [gib <= limit_gib for _, gib in measures.values()]
    for axis, column, look in (("", 0, chart.series(0)), ("2", 1, chart.series(2))):
        values = [pair[column] for pair in measures.values()]
        figure.add_trace(
            go.Bar(
                orientation="h", x=values, y=list(range(len(names))), xaxis=f"x{axis}", yaxis="y", width=0.64,
                marker={"color": look.color, "pattern": {"shape": ["" if fit else "/" for fit in fits],
                        "fgcolor": "#FFFFFF", "fgopacity": 0.5, "size": 7, "solidity": 0.3, "fillmode": "overlay"}},
                hoverinfo="skip", showlegend=False,
            )
        )  # fmt: skip
        x = measures[base][column]
        labels = [
            f" {value:,.0f}{', too much' if column and not fit else ''}"
            for value, fit in zip(values, fits, strict=True)
        ]
        beside = [x if x * (1 - LABEL_SHARE) < value < x else value for value in values]  # not across the dashed line
        figure.add_trace(
            go.Scatter(
                x=beside, y=list(range(len(names))), xaxis=f"x{axis}", yaxis="y", mode="text", text=labels,
                textposition="middle right", cliponaxis=False, hoverinfo="skip", showlegend=False,
            )
        )  # fmt: skip
        line = {"color": theme.MUTED, "width": 1.5, "dash": "dash"}
        figure.add_shape(type="line", x0=x, x1=x, y0=0, y1=1, xref=f"x{axis}", yref="paper", line=line, layer="below")
    limit = {"color": theme.LIMIT, "width": 2, "dash": "dot"}
    figure.add_shape(type="line", x0=limit_gib, x1=limit_gib, y0=0, y1=1, xref="x2", yref="paper", line=limit)
    tops = [1.3 * max(pair[column] for pair in measures.values()) for column in (0, 1)]
    figure.update_layout(
        xaxis={"domain": [0, 0.47], "range": [0, tops[0]], "title": {"text": "ms per step"}, "fixedrange": True},
        xaxis2={
            "domain": [0.53, 1], "range": [0, tops[1]], "title": {"text": PEAK},
            "anchor": "y", "fixedrange": True,
        },
        yaxis={
            "range": [len(names) - 0.4, -0.6], "tickvals": list(range(len(names))),
            "ticktext": [f"<b>{safe(n)}</b>" if n == base else safe(n) for n in names], "showgrid": False,
            "fixedrange": True,
        },
    )  # fmt: skip
    left = round(30 + LETTER_PX * max(map(len, names)))
    chart.frame(figure, sentence, plot_px=BAR_PX * len(names), left=left)
    rows = [
        (name, f"{ms:,.0f} ms", f"{gib:,.1f} GiB", "fits" if fit else "does not fit")
        for (name, (ms, gib)), fit in zip(measures.items(), fits, strict=True)
    ]
    text = "; ".join(f"{name} {ms}, {gib}, {fit}" for name, ms, gib, fit in rows)
    return Picture(figure, f"{sentence}. {text}.", (Table("", ("", "step", "peak", ""), tuple(rows)),))
