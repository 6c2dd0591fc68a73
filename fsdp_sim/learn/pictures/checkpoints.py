"""Where the rows of a tensor lie in the files of a checkpoint, and which saves make a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from fsdp_sim.viz import chart, theme
from fsdp_sim.viz.picture import Picture
from fsdp_sim.viz.table import Table
from fsdp_sim.viz.theme import safe

Rows = tuple[int, int]
"""The first row, and the one after the last."""

BAR_PX, CELL_PX, HALF = 40, 46, 0.36
NARROW = 0.12  # part of the width, below which there is no room for a file's name
LIGHT_TEXT = ("#0072B2", "#009E73", "#D55E00")  # on these colours white is legible
YES, NO = theme.OPTIMIZER.color, theme.REDUCE_SCATTER.color


def reads(files: Mapping[str, Rows], wanted: Mapping[str, Rows], sentence: str) -> Picture:
    """A tensor's rows from left to right: above by the file that has them, below by who wants them, from which file.

    Args:
        files: the rows that each file has.
        wanted: the rows that each rank shall hold after loading.
        sentence: the headline.
    """
    figure, most = go.Figure(), max(end for _, end in files.values())
    names = [*files, *wanted]
    looks = {name: chart.series(number) for number, name in enumerate(files)}
    pieces = {owner: _pieces(files, rows) for owner, rows in wanted.items()}
    bars = [(name, name, rows) for name, rows in files.items()]
    bars += [(owner, name, rows) for owner, found in pieces.items() for name, rows in found.items()]
    for owner, name, (first, end) in bars:
        look = looks[name]
        which = f"{first} to {end - 1}" if end - first > 1 else f"{first}"
        text = f"{safe(name)}: {which}" if end - first > NARROW * most else which
        figure.add_trace(
            go.Bar(
                orientation="h", y=[names.index(owner)], x=[end - first], base=[first], width=2 * HALF,
                text=[text], textposition="inside", insidetextanchor="middle", textangle=0,
                textfont={"color": "#FFFFFF" if look.color in LIGHT_TEXT else theme.INK},
                hovertext=[f"{safe(owner)}: rows {which} of {safe(name)}"], hoverinfo="text", showlegend=False,
                marker={
                    "color": look.color, "line": {"width": 1, "color": "#FFFFFF"},
                    "pattern": {"shape": look.pattern, "fgcolor": "#FFFFFF", "fgopacity": 0.3, "size": 8,
                                "solidity": 0.2, "fillmode": "overlay"},
                },
            )
        )  # fmt: skip
    figure.add_hline(len(files) - 0.5, line={"color": theme.SEPARATOR, "width": 1})
    figure.update_layout(
        barmode="overlay",
        xaxis={"range": [0, most], "title": {"text": "rows of the tensor", "standoff": 6}},
        yaxis={
            "range": [len(names) - 0.45, -0.55], "tickvals": list(range(len(names))),
            "ticktext": [safe(name) for name in names], "showgrid": False, "fixedrange": True,
        },
    )  # fmt: skip
    chart.frame(figure, sentence, plot_px=BAR_PX * len(names), left=40 + 7 * max(map(len, names)), above=16)
    cells = [
        (owner, ", ".join(f"{name}, rows {a} to {b - 1}" for name, (a, b) in found.items()))
        for owner, found in pieces.items()
    ]
    readers = "; ".join(f"{owner} reads {what}" for owner, what in cells)
    return Picture(figure, f"{sentence}. {readers}.", (Table("What is read", ("", "from"), tuple(cells)),))


def _pieces(files: Mapping[str, Rows], rows: Rows) -> dict[str, Rows]:
    """Which of some rows each file has."""
    cut = {name: (max(first, rows[0]), min(end, rows[1])) for name, (first, end) in files.items()}
    return {name: (first, end) for name, (first, end) in cut.items() if first < end}


def saves(written: Mapping[str, Sequence[bool]], counts: Sequence[bool], sentence: str) -> Picture:
    """A row for each rank and a column for each save: whether this rank's file was written; below, what counts.

    Args:
        written: by rank, for each save.
        counts: for each save, whether a restart can load it.
        sentence: the headline.
    """
    figure = go.Figure()
    rows = {**written, "a checkpoint": counts}
    for y, (name, cells) in enumerate(rows.items()):
        last = name == "a checkpoint"
        for x, good in enumerate(cells):
            box: dict[str, Any] = {"type": "rect", "x0": x - 0.45, "x1": x + 0.45, "y0": y - HALF, "y1": y + HALF}
            line = {"width": 2 if last else 0, "color": YES if good else NO}
            figure.add_shape(box, line=line, fillcolor=theme.BAND if last else YES if good else NO)
            outcome = ("counts" if good else "does not count") if last else ("✓ written" if good else "✗ no room")
            place: dict[str, Any] = {"x": x, "xref": "x", "y": y, "yref": "y", "xanchor": "center", "yanchor": "middle"}
            place |= {} if last else {"font": {"color": "#FFFFFF", "size": 12}}
            chart.write(figure, f"<b>{outcome}</b>", **place)
    figure.add_trace(go.Scatter(x=[], y=[], showlegend=False))
    n = len(counts)
    figure.update_layout(
        xaxis={"range": [-0.5, n - 0.5], "tickvals": list(range(n)), "ticktext": [f"step {i}" for i in range(n)],
               "showgrid": False, "fixedrange": True},
        yaxis={"range": [len(rows) - 0.45, -0.55], "tickvals": list(range(len(rows))),
               "ticktext": [safe(name) for name in rows], "showgrid": False, "fixedrange": True},
    )  # fmt: skip
    chart.frame(figure, sentence, plot_px=CELL_PX * len(rows), left=110)
    cells_of = tuple((name, *("yes" if good else "no" for good in cells)) for name, cells in rows.items())
    text = f"A checkpoint: steps {', '.join(str(i) for i, good in enumerate(counts) if good)}."
    return Picture(figure, f"{sentence}. {text}", (Table("Written", ("", *(f"step {i}" for i in range(n))), cells_of),))
