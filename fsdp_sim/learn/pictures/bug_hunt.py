"""Where ranks stand when a job hangs, and which of their numbers are right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import plotly.graph_objects as go
import torch

from fsdp_sim.ranks import RanksError
from fsdp_sim.viz import Picture, Table, chart, theme
from fsdp_sim.words import byte_unit, human_bytes

BOX_PX = 44
DRAWN = 120  # places of a step's memory; of each the most that was alive
CLOSE = 1e-4  # relative; what several steps in another order of additions differ by
STANDS = re.compile(
    r"^(?:->|  ) rank (\d+)  ([^#\n]*?)(?: (?:in|after|before its).*?)?(?:#(\d+) ([^\s(]+(?:\([^)]*\))?).*)?$", re.M
)
"""A line of a report: rank, what it does, the number and the label of its last collective."""


class BoxStyle(Enum):
    """What a box says: a colour, and a sign that says the same."""

    DONE = (theme.ALL_GATHER.color, "")
    WAITS = (theme.BACKWARD.color, "… ")
    RIGHT = (theme.OPTIMIZER.color, "✓ ")
    WRONG = (theme.REDUCE_SCATTER.color, "✗ ")
    NOTHING = ("rgba(110,125,140,0.12)", "")


class Box(NamedTuple):
    """One cell."""

    text: str
    style: BoxStyle = BoxStyle.DONE


def boxes(rows: Mapping[str, Sequence[Box]], sentence: str, columns: Sequence[str] = ()) -> Picture:
    """Rows of boxes of one width.

    Args:
        columns: their names, from the left; their numbers from 1 by default.
        sentence: the title; what is to be seen.
    """
    width = max(map(len, rows.values()))
    names = list(columns) or [str(number + 1) for number in range(width)]
    padded = [[*row, *[Box("", BoxStyle.NOTHING)] * (width - len(row))] for row in rows.values()]
    styles = list(BoxStyle)
    scale = [(edge, style.value[0]) for place, style in enumerate(styles) for edge in _edges(place, len(styles))]
    texts = [[box.style.value[1] + box.text for box in row] for row in padded]
    figure = go.Figure(
        go.Heatmap(
            z=[[styles.index(box.style) for box in row] for row in padded], zmin=-0.5, zmax=len(styles) - 0.5,
            x=names, y=list(rows), text=texts, texttemplate="%{text}", textfont={"size": 12, "color": theme.INK},
            colorscale=scale, showscale=False, xgap=3, ygap=3, hovertemplate="%{y}, %{x}: %{text}<extra></extra>",
        )
    )  # fmt: skip
    left = 30 + 8 * max(map(len, rows))
    chart.frame(figure, sentence, plot_px=BOX_PX * len(rows), left=left, bottom=50)
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(autorange="reversed", type="category", showgrid=False)
    cells = tuple((name, *(text.replace("<br>", " ") for text in row)) for name, row in zip(rows, texts, strict=True))
    return Picture(figure, f"{sentence}.", (Table(sentence, ("", *names), cells),))


def error_of(call: Callable[..., object], *arguments: Any, **options: Any) -> RanksError:
    """What a call on ranks ends with.

    Raises:
        AssertionError: it ends well.
    """
    try:
        call(*arguments, **options)
    except RanksError as error:
        return error
    raise AssertionError(f"{call.__name__} ended well; a hang or an error of its ranks was expected")


def where_ranks_stand(error: RanksError, sentence: str = "", last: int = 5) -> Picture:
    """The collectives up to which each rank has come, by the watchdog's report.

    Args:
        last: how many numbers are drawn.
    """
    found = {int(rank): (doing, int(number or 0), label) for rank, doing, number, label in STANDS.findall(str(error))}
    end = max(number for _, number, _ in found.values())
    numbers = range(max(1, end - last + 1), end + 1)
    rows = {}
    for rank, (doing, at, label) in found.items():
        waits = doing.startswith("waits")
        here = Box(_two_lines(label), BoxStyle.WAITS if waits else BoxStyle.DONE)
        after = Box("never came", BoxStyle.WRONG if rank in error.verdict.ranks else BoxStyle.NOTHING)
        rows[f"rank {rank} {doing.split(',')[0].strip()}"] = [
            Box("done")
            if number < at
            else here
            if number == at
            else after
            if number == at + 1
            else Box("", BoxStyle.NOTHING)
            for number in numbers
        ]
    headline = " ".join(error.verdict.headline.split())
    return boxes(rows, sentence or headline[0].upper() + headline[1:], [f"#{number}" for number in numbers])


def agreement(
    right: Mapping[str, torch.Tensor], found: Mapping[str, Mapping[str, torch.Tensor]], caption: str
) -> Table:
    """Which tensors are what one process has, and by how much the others are off.

    Args:
        right: by name.
        found: the same names, by who has computed them.
    """

    def said(name: str, tensor: torch.Tensor) -> str:
        truth = right[name].double()
        off = ((tensor.double() - truth).norm() / truth.norm()).item()
        return "right" if off < CLOSE else f"off by {off:.0%}"

    rows = tuple((name, *(said(name, of[name]) for of in found.values())) for name in right)
    return Table(caption, ("", *found), rows)


def _two_lines(label: str) -> str:
    """``all_gather(layers.0)`` with the unit on a line of its own."""
    op, _, unit = label.removesuffix(")").partition("(")
    return f"{op}<br>{unit}" if unit else op


def _edges(place: int, of: int) -> tuple[float, float]:
    return place / of, (place + 1) / of


def memory_curves(of: Mapping[str, Mapping[str, Any]]) -> Picture:
    """The bytes alive, from allocation to allocation, of several runs; the places are evened out to steps.

    Args:
        of: by name, ``alive_bytes`` after each allocation and release, and ``steps``, the places at which a step ended.
    """
    size, unit = byte_unit(max(int(run["alive_bytes"].max()) for run in of.values()))
    figure, rows = go.Figure(), []
    for number, (name, run) in enumerate(of.items()):
        look, alive, ends = chart.series(number), run["alive_bytes"].tolist(), [0, *run["steps"]]
        x: list[float] = []
        y: list[float] = []
        for step, (start, end) in enumerate(pairwise(ends)):
            for place in range(DRAWN):
                first, last = (start + (end - start) * (place + more) // DRAWN for more in (0, 1))
                x.append(step + place / DRAWN)
                y.append(max(alive[first : max(last, first + 1)]) / size)
        figure.add_scatter(x=x, y=y, name=name, mode="lines", line={"color": look.color, "dash": look.dash, "width": 2})
        told = [(max(alive[start : end + 1]), alive[end]) for start, end in pairwise(ends)]
        rows.append((name, *(f"{human_bytes(peak)}, then {human_bytes(last)}" for peak, last in told)))
    steps = max(len(row) for row in rows) - 1
    sentence = "What is alive, allocation by allocation"
    _framed(figure, sentence, "steps", f"{unit} alive")
    figure.update_xaxes(dtick=1)
    figure.update_yaxes(rangemode="tozero")
    header = ("peak of each step, and what is alive at its end", *(f"step {step + 1}" for step in range(steps)))
    return Picture(figure, f"{sentence}.", (Table(sentence, header, tuple(rows)),))


def _framed(figure: go.Figure, sentence: str, x: str, y: str) -> None:
    chart.frame(figure, sentence, plot_px=240, bottom=90)
    figure.update_layout(legend={"orientation": "h", "yref": "container", "y": 0.02, "yanchor": "bottom"})
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
