"""Pictures of the chapter on sharding: which rank owns which number of a tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from fsdp_sim.viz import Picture, Table, chart, theme

Owners = NDArray[np.int_]
"""By row and column of a tensor, the rank that keeps the number; `PADDING` where there is none."""

PADDING = -1
CELL_PX, GAP, NAME_PX = 30, 1.0, 34
PADDING_COLOUR = "#E1E4E8"


def by_rows(rows: int, columns: int, ranks: int, *, padded: bool = False) -> Owners:
    """Cut along dim 0 as fully_shard does, by default without the padding that a collective needs."""
    most = -(-rows // ranks)
    owners = np.repeat(np.arange(ranks), most)
    cut = np.where(np.arange(ranks * most) < rows, owners, PADDING)
    return np.repeat(cut[: ranks * most if padded else rows, None], columns, axis=1)


def by_columns(rows: int, columns: int, ranks: int) -> Owners:
    """Cut along dim 1."""
    return by_rows(columns, rows, ranks).T


def end_to_end(shapes: Sequence[tuple[int, int]], ranks: int) -> list[Owners]:
    """FSDP1's flat parameter: all tensors laid end to end and cut into equal chunks."""
    sizes = [rows * columns for rows, columns in shapes]
    most = -(-sum(sizes) // ranks)
    flat = np.split(np.arange(sum(sizes)) // most, np.cumsum(sizes)[:-1])
    return [one.reshape(shape) for one, shape in zip(flat, shapes, strict=True)]


def owners(tensors: Mapping[str, Owners], sentence: str) -> Picture:
    """Tensors side by side, each number in the colour, and with the number, of the rank that keeps it.

    Args:
        tensors: by name, at most 16 columns together.
        sentence: the title; what is to be seen.
    """
    figure, x0 = go.Figure(), 0.0
    height = max(len(one) for one in tensors.values())
    for name, owner in tensors.items():
        rows, columns = owner.shape
        title: dict[str, Any] = {"x": x0, "y": -0.25, "xref": "x", "yref": "y", "yanchor": "bottom"}
        chart.write(figure, f"<b>{theme.safe(name)}</b>", **title)
        for row in range(rows):
            for column in range(columns):
                _cell(figure, x0 + column, row, int(owner[row, column]))
        x0 += columns + max(GAP, 0.26 * len(name) - columns + GAP)
    chart.frame(figure, sentence, plot_px=CELL_PX * height + NAME_PX, left=24, right=24, bottom=20)
    figure.update_xaxes(range=[-0.1, max(x0, 24)], visible=False, fixedrange=True)
    figure.update_yaxes(range=[height + 0.1, -NAME_PX / CELL_PX], visible=False, fixedrange=True)
    sentences = [f"{name}: {_shares(owner)}" for name, owner in tensors.items()]
    cells = tuple((name, str(list(one.shape)), _shares(one)) for name, one in tensors.items())
    return Picture(
        figure, f"{sentence}. {'. '.join(sentences)}.", (Table(sentence, ("tensor", "shape", "kept"), cells),)
    )


def _cell(figure: go.Figure, x: float, y: float, owner: int) -> None:
    colour = PADDING_COLOUR if owner == PADDING else chart.series(owner).color
    edge = {"color": "white", "width": 2}
    figure.add_shape(type="rect", x0=x, x1=x + 1, y0=y, y1=y + 1, fillcolor=colour, line=edge, layer="below")
    font = {"size": 13, "color": theme.INK if owner in (PADDING, 1) else "#FFFFFF"}
    place: dict[str, Any] = {
        "x": x + 0.5,
        "y": y + 0.5,
        "xref": "x",
        "yref": "y",
        "xanchor": "center",
        "yanchor": "middle",
    }
    chart.write(figure, "·" if owner == PADDING else f"<b>{owner}</b>", font=font, **place)


def _shares(owner: Owners) -> str:
    """How many numbers each rank keeps."""
    ranks, counts = np.unique(owner, return_counts=True)
    named = ["padding" if rank == PADDING else f"rank {rank}" for rank in ranks]
    return ", ".join(f"{name} {count}" for name, count in zip(named, counts, strict=True))
