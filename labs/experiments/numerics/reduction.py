"""Gradients of many ranks added up in bf16: each addition rounds, so the error grows with their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdp_sim import ranks as processes
from labs.cluster.process_group import n_ranks
from labs.experiments.numerics.small_training import gradients_of, gradients_whole, off, rows_of, spread
from labs.experiments.result import ResultRow

if TYPE_CHECKING:
    from fsdp_sim.viz import Picture

BF16_UNIT = 2.0**-8
"""The largest relative error of rounding to bf16, which keeps 8 binary digits."""
BF16_RMS = BF16_UNIT * math.sqrt(2 * math.log(2)) / 3
"""Its root mean square over many numbers whose logarithms are spread evenly, each weighted by its square: an error is
spread evenly over one spacing, 2^-7 of the power of two below, and the mean square of a mantissa is 3 / (2 ln 2)."""


def predict_reduction(two: torch.Tensor, ranks: int) -> float:
    """The relative error of the mean over ranks when every addition rounds to bf16, as around a ring.

    Each gradient is rounded once, then each of the sums of 2, 3, ... gradients: as many errors, independent of each
    other, each `BF16_RMS` of what was rounded. A sum of k gradients has the squared norm k^2 s + k v, where s is the
    part that all ranks have in common and v what differs.

    Args:
        two: the gradients (2, parameters) of two ranks, from which s and v are estimated.
    """
    common = max(0.0, float(two[0] @ two[1]))  # below 0 only by chance
    differs = float((two[0] - two[1]).square().sum()) / 2
    square = [k * k * common + k * differs for k in range(1, ranks + 1)]
    return BF16_RMS * math.sqrt((ranks * square[0] + sum(square[1:])) / square[-1])


def add_in_bf16(gradients: torch.Tensor) -> float:
    """The relative error of a mean of gradients (ranks, parameters), added one after the other in bf16."""
    total = gradients[0].bfloat16()
    for gradient in gradients[1:]:
        total = total + gradient.bfloat16()
    return off(total.float(), gradients.sum(0))


def _reduced(reduce_dtype: str, rows: int) -> torch.Tensor:
    rank, wrapped = dist.get_rank(), spread(reduce_dtype=reduce_dtype)
    x, y = rows_of(rows, rank * rows)
    wrapped.model(x, y).backward()
    return gradients_whole(wrapped)


def reduce_in_bf16(ranks: int, rows: int = 2) -> float:
    """The relative error of FSDP2's reduced gradients with ``reduce_dtype=bf16``, by those with fp32, on real ranks."""

    def both() -> float:
        return off(_reduced("bf16", rows), _reduced("fp32", rows))

    return processes.run(both, ranks, threads=1, timeout_s=60, progress=False)[0]


def reduction(real: Sequence[int] = (2, 4, 8), added: Sequence[int] = (2, 4, 8, 16, 32, 64)) -> list[ResultRow]:
    """Predicted from the gradients of two ranks; measured with FSDP2 and, for more ranks, by adding in one process."""
    gradients = gradients_of(max(added))
    name, quantity = "reduce_dtype=bf16, {}", "error of the gradient"
    rows = [
        ResultRow(name.format(n_ranks(n)), quantity, predict_reduction(gradients[:2], n), reduce_in_bf16(n), "relative")
        for n in real
    ]
    return rows + [
        ResultRow(
            name.format(f"{n} gradients added here"), quantity,
            predict_reduction(gradients[:2], n), add_in_bf16(gradients[:n]), "relative",
        )
        for n in added
    ]  # fmt: skip


def reduction_picture(rows: Sequence[ResultRow]) -> Picture:
    """The error by the number of ranks: predicted as a line, measured as marks, and the rounding of one number."""
    import plotly.graph_objects as go  # where it is drawn: ranks import this module, too

    from fsdp_sim.viz import Picture, Table, chart

    found = [(int("".join(c for c in row.name.partition(", ")[2] if c.isdigit())), row) for row in rows]
    real = [(n, row) for n, row in found if "here" not in row.name]
    added = [(n, row) for n, row in found if "here" in row.name]
    figure = go.Figure()
    figure.add_scatter(
        x=[n for n, _ in added], y=[row.predicted for _, row in added], name="predicted", mode="lines",
        line={"color": chart.series(0).color, "width": 2},
    )  # fmt: skip
    for number, name, marks in ((1, "FSDP2 on real ranks", real), (2, "added in one process", added)):
        look = chart.series(number)
        figure.add_scatter(
            x=[n for n, _ in marks], y=[row.measured for _, row in marks], name=f"measured: {name}", mode="markers",
            marker={"color": look.color, "symbol": look.symbol, "size": 11, "line": {"color": "white", "width": 1}},
        )  # fmt: skip
    errors = [float(value) for _, row in found for value in (row.predicted, row.measured) if value]
    low, high = min(*errors, BF16_UNIT), max(errors)
    figure.add_hline(y=BF16_UNIT, line={"dash": "dot", "width": 1})
    chart.frame(figure, "Adding gradients in bf16: the error grows like the root of the number of ranks", plot_px=300)
    figure.update_layout(legend={"orientation": "h", "y": -0.2, "yanchor": "top"}, margin={"b": 100})
    ranks = sorted({n for n, _ in found})
    marked = {"tickvals": ranks, "ticktext": [str(n) for n in ranks]}
    figure.update_xaxes(title="ranks", **chart.log_axis(ranks[0], ranks[-1]) | marked)
    figure.update_yaxes(title="relative error of the gradient", **chart.log_axis(low, high))
    figure.add_annotation(
        x=0, xref="paper", y=math.log10(BF16_UNIT), text="2⁻⁸: rounding one number, at worst", showarrow=False,
        xanchor="left", yanchor="bottom",
    )  # fmt: skip
    worst = max(abs(row.error or 0.0) for _, row in found)
    finding = f"The prediction is within {worst:.0%} of every measurement."
    cells = tuple((row.name, f"{row.predicted:.5f}", f"{row.measured:.5f}") for _, row in found)
    return Picture(figure, finding, (Table("relative error", ("", "predicted", "measured"), cells),))
