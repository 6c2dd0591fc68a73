"""Pictures of the chapter on the life of a unit: which rank holds which rows, and whose numbers they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import plotly.graph_objects as go

from fsdp_sim.viz import Picture, Table, chart

ROW_PX = 26


class ShardCell(NamedTuple):
    """A row of a tensor that some rank holds: the rank that colours it, and what is written in it."""

    rank: int
    text: str


def rows_held(sentence: str, columns: Mapping[str, Sequence[ShardCell | None]], *, row: str = "row {}") -> Picture:
    """Which rows of a tensor are held, column by column; a row that is not held stays empty.

    Args:
        sentence: what the picture shows.
        columns: by name, the rows from the first to the last.
        row: names a row by its number.
    """
    rows = max(map(len, columns.values()))
    ranks = 1 + max(cell.rank for column in columns.values() for cell in column if cell)
    filled = [[*column, *[None] * (rows - len(column))] for column in columns.values()]
    by_row, names = list(zip(*filled, strict=True)), [row.format(number) for number in range(rows)]
    steps = [(edge / ranks, chart.series(rank).color) for rank in range(ranks) for edge in (rank, rank + 1)]
    figure = go.Figure(
        go.Heatmap(
            z=[[cell.rank if cell else None for cell in line] for line in by_row],
            text=[[cell.text if cell else "" for cell in line] for line in by_row],
            x=list(columns), y=names, zmin=-0.5, zmax=ranks - 0.5,
            colorscale=steps, showscale=False, texttemplate="%{text}", hoverinfo="skip", xgap=6, ygap=2,
        )
    )  # fmt: skip
    chart.frame(figure, sentence, plot_px=ROW_PX * rows, bottom=40)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_xaxes(showgrid=False)
    held = tuple(
        (name, *(cell.text if cell else "" for cell in column)) for name, column in zip(columns, filled, strict=True)
    )
    words = "; ".join(f"{name}: {', '.join(filter(None, cells)) or 'nothing'}" for name, *cells in held)
    table = Table(sentence, ("", *names), held)
    return Picture(figure, f"{sentence}. {words}.", (table,))
