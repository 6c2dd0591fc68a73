"""Who holds what, what bytes add up to, and what becomes of them with more ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe

Held = Sequence[Sequence[tuple[float, float]]]
"""By rank and layer, which rows the rank stores: from and to, as parts of the whole, ``(0.25, 0.5)``."""

CELL, GAP = 1.0, 0.16  # of a layer's cell and of the room between two; in the units of the axes
ROW_PX, BAR_PX, PLOT_PX, NAME_PX = 44, 46, 330, 8
STORED, PLACE = theme.FORWARD.color, theme.BAND


def holders(ways: Mapping[str, Held], sentence: str) -> Picture:
    """Panels side by side, one for each way to train: a row for each rank, a cell for each layer.

    The filled part of a cell is the rows that the rank stores of that layer.

    Args:
        ways: a name, and what is held; all of as many ranks.
        sentence: the headline.
    """
    ranks = max(len(held) for held in ways.values())
    figure, left = go.Figure(), 0.0
    for name, held in ways.items():
        layers = len(held[0])
        for rank, row in enumerate(held):
            for layer, (first, last) in enumerate(row):
                x, y = left + layer * (CELL + GAP), rank * (CELL + GAP) - CELL / 2
                box: dict[str, Any] = {"type": "rect", "x0": x, "x1": x + CELL}
                line = {"width": 1, "color": theme.SEPARATOR}
                figure.add_shape(box, y0=y, y1=y + CELL, fillcolor=PLACE, line=line)
                figure.add_shape(box, y0=y + first * CELL, y1=y + last * CELL, fillcolor=STORED, line={"width": 0})
        middle: dict[str, Any] = {"x": left + layers * (CELL + GAP) / 2, "xref": "x", "xanchor": "center"}
        chart.write(figure, f"<b>{safe(name)}</b>", **middle, y=1, yshift=4)
        left += layers * (CELL + GAP) + 1.4
    figure.update_layout(
        xaxis={"range": [-GAP, left - 1.4], "visible": False, "fixedrange": True},
        yaxis={
            "range": [ranks * (CELL + GAP) - 0.6, -0.6],
            "tickvals": [rank * (CELL + GAP) for rank in range(ranks)],
            "ticktext": [f"rank {rank}" for rank in range(ranks)],
            "showgrid": False,
            "fixedrange": True,
        },
    )
    figure.add_trace(go.Scatter(x=[], y=[], showlegend=False))
    text = "A cell is a layer's weight; filled are the rows that the rank stores."
    chart.write(figure, text, muted=True, x=0, y=0, yanchor="top", yshift=-8)
    chart.frame(figure, sentence, plot_px=ROW_PX * ranks, above=30, bottom=40)
    rows = [
        (name, *(" ".join(f"{last - first:.0%}" for first, last in row) for row in held)) for name, held in ways.items()
    ]
    table = Table("Part of each layer that is stored", ("", *(f"rank {r}" for r in range(ranks))), tuple(rows))
    return Picture(figure, f"{sentence}. {text}", (table,))


def stacks(named: Mapping[str, Mapping[str, float]], sentence: str, unit: str) -> Picture:
    """Stacked horizontal bars: for each name the parts that it is the sum of.

    Args:
        named: what a bar is, and its parts; parts of one name look alike in all bars.
        unit: of the numbers.
    """
    figure, parts = go.Figure(), list(dict.fromkeys(part for of in named.values() for part in of))
    most = max(sum(of.values()) for of in named.values())
    for number, part in enumerate(parts):
        look = chart.series(number)
        sizes = [of.get(part, 0) for of in named.values()]
        figure.add_trace(
            go.Bar(
                orientation="h", name=safe(part), x=sizes, y=list(range(len(named))), width=0.7,
                text=[f"{size:,.3g}" if size > 0.05 * most else "" for size in sizes],
                textposition="inside", insidetextanchor="middle", textangle=0,
                textfont={"color": "#FFFFFF" if look.color in ("#0072B2", "#D55E00", "#009E73") else theme.INK},
                hovertext=[f"{safe(part)}: {size:,.4g} {unit}" for size in sizes], hoverinfo="text",
                marker={
                    "color": look.color, "line": {"width": 0.8, "color": "#FFFFFF"},
                    "pattern": {"shape": look.pattern, "fgcolor": "#FFFFFF", "fgopacity": 0.35, "size": 7,
                                "solidity": 0.2, "fillmode": "overlay"},
                },
            )
        )  # fmt: skip
    for y, of in enumerate(named.values()):
        if len([size for size in of.values() if size]) < 2:
            continue  # the number in the bar is all of it; or there is no bar
        total: dict[str, Any] = {
            "x": sum(of.values()),
            "xref": "x",
            "y": y,
            "yref": "y",
            "yanchor": "middle",
            "xshift": 6,
        }
        chart.write(figure, f"<b>{sum(of.values()):,.4g}</b>", **total)
    figure.update_layout(
        barmode="stack",
        uniformtext={"minsize": 10, "mode": "hide"},
        xaxis={"range": [0, 1.12 * most], "title": {"text": unit, "standoff": 6}},
        yaxis={
            "range": [len(named) - 0.45, -0.55], "tickvals": list(range(len(named))),
            "ticktext": [safe(name) for name in named], "showgrid": False, "fixedrange": True,
        },
    )  # fmt: skip
    longest = max(map(len, named))
    chart.frame(figure, sentence, plot_px=BAR_PX * len(named), left=40 + 7 * longest, above=44)
    _legend(figure)
    rows = [
        (name, *(f"{of.get(part, 0):,.4g}" for part in parts), f"{sum(of.values()):,.4g}") for name, of in named.items()
    ]
    text = "; ".join(f"{name}: {sum(of.values()):,.4g} {unit}" for name, of in named.items())
    return Picture(figure, f"{sentence}. {text}.", (Table(unit, ("", *parts, "all"), tuple(rows)),))


def curves(
    lines: Mapping[str, Mapping[int, float]], sentence: str, *, x: str, y: str, limits: Mapping[str, float] = {}
) -> Picture:
    """Lines over a logarithmic axis of whole numbers, each named at its end, and level lines that must not be crossed.

    Args:
        lines: a name, and values by the number on the x axis.
        x, y: what the axes are.
        limits: level lines by name.
    """
    figure, counts = go.Figure(), sorted({count for line in lines.values() for count in line})
    top = 1.08 * max([*limits.values(), *(value for line in lines.values() for value in line.values())])
    for number, (name, line) in enumerate(lines.items()):
        look = chart.series(number)
        figure.add_trace(
            go.Scatter(
                x=list(line), y=list(line.values()), name=safe(name), mode="lines+markers",
                line={"color": look.color, "width": 2.5, "dash": look.dash},
                marker={"color": look.color, "size": 9, "symbol": look.symbol},
                hovertemplate=f"{safe(name)}<br>%{{x}} {safe(x)}: %{{y:,.4g}} {safe(y)}<extra></extra>",
            )
        )  # fmt: skip
    reached = float("inf")
    for name, line in sorted(lines.items(), key=lambda one: -one[1][max(one[1])]):
        reached = min(line[max(line)], reached - 18 / PLOT_PX * top)
        chart.write(figure, safe(name), x=1, xshift=6, y=reached, yref="y", yanchor="middle")
    for name, value in limits.items():
        figure.add_hline(value, line={"color": theme.LIMIT, "width": 2, "dash": "dash"})
        text: dict[str, Any] = {"x": 0.99, "xanchor": "right", "y": value, "yref": "y", "yshift": 2}
        chart.write(figure, safe(name), **text, font={"size": 12, "color": theme.LIMIT})
    marks = {"tickvals": counts, "ticktext": [f"{count:,}" for count in counts]}
    figure.update_layout(
        xaxis=chart.log_axis(counts[0], counts[-1], room=0.03) | marks | {"title": {"text": x, "standoff": 6}},
        yaxis={"range": [0, top], "fixedrange": True},
        showlegend=False,
    )
    chart.write(figure, f"<b>{safe(y)}</b>", x=0, y=1, yshift=4)
    chart.frame(figure, sentence, plot_px=PLOT_PX, right=30 + NAME_PX * max(map(len, lines)), above=30)
    rows = [(f"{n:,}", *(f"{line[n]:,.4g}" if n in line else "" for line in lines.values())) for n in counts]
    return Picture(figure, f"{sentence}.", (Table(y, (x, *lines), tuple(rows)),))


def _legend(figure: go.Figure) -> None:
    """Between the headline and the bars."""
    corner = {"x": 0, "xref": "container", "xanchor": "left", "yref": "container", "yanchor": "top"}
    y = 1 - (figure.layout.margin.t - 46) / figure.layout.height
    figure.update_layout(legend=corner | {"y": y, "orientation": "h", "traceorder": "normal"})
