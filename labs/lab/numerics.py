"""Precision, accumulation, clipping: what changes the numbers of a training, and by how much.

    python -m labs.lab.numerics                     four ranks, a small GPT
    python -m labs.lab.numerics --ranks 8 --steps 20

Everything is predicted from a formula first, then done with torch's own FSDP2 and FSDP1 on real ranks:

    reduction      gradients of many ranks added up in bf16: each addition rounds, so the error grows with their number
    fp16           gradients too small for the format, and the scaler that lifts them
    accumulation   reduce in each micro-batch, or in the last one only: the same numbers, bytes sent for bytes kept
    clipping       the norm of all ranks' gradients, and what becomes of it when a rank clips by its own shards
    tokens         ranks with unequally many tokens: a mean of means is not the mean
    losses         the trainer in fp32 and in bf16 (on GPUs, where it can, in fp16 too)

All but the last is done on CPU cores also where there are GPUs: a format rounds in the same way everywhere.
Exit status: 0 done, 1 a training failed, 2 asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch
import torch.distributed as dist
import tyro
from rich.console import Console

from fsdp_sim import ranks as processes
from fsdp_sim.measure import live_bytes
from fsdp_sim.timeline import Op
from fsdp_sim.viz import Picture, Table, chart
from labs.checkpoint.state import whole
from labs.config import TrainConfig
from labs.data import load_corpus
from labs.gpt import IGNORED, GPTConfig, loss_of
from labs.lab.result import Result, Row, this_machine
from labs.models import build
from labs.place import Place, find_device, n_ranks
from labs.trained import FailedError, train
from labs.wrapping import Wrapped, wrap

MODEL = GPTConfig.preset("teaching", n_layer=2)
SEQ_LEN = 64
BF16_UNIT = 2.0**-8
"""The largest relative error of rounding to bf16, which keeps 8 binary digits."""
BF16_RMS = BF16_UNIT * math.sqrt(2 * math.log(2)) / 3
"""Its root mean square over many numbers whose logarithms are spread evenly, each weighted by its square: an error is
spread evenly over one spacing, 2^-7 of the power of two below, and the mean square of a mantissa is 3 / (2 ln 2)."""
FP16_SMALLEST = 2.0**-24
"""What is at most half of it becomes 0."""
SCALE = 2.0**16
"""With which `torch.amp.GradScaler` begins."""


def _rows(n: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each (n, SEQ_LEN); the same on every rank."""
    x, y = load_corpus().batch(0, first + n, SEQ_LEN)
    return x[first:], y[first:]


def _wrapped(**changes: Any) -> Wrapped:
    """`MODEL` spread over the ranks of this call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = Place(rank, ranks, rank, ranks)
    return wrap(TrainConfig(n_layer=MODEL.n_layer, **changes), MODEL, place, torch.device("cpu"))


def _gradients(wrapped: Wrapped) -> torch.Tensor:
    """Those of all parameters, whole, as one vector. A collective call."""
    return torch.cat([whole(p.grad).flatten() for p in wrapped.model.parameters() if p.grad is not None])


def _off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference, over that of ``b``."""
    return float((a - b).norm() / b.norm())


# ---- Adding up gradients in bf16 ------------------------------------------------------------------------------------


def gradients_of(ranks: int, rows: int = 2) -> torch.Tensor:
    """The gradients (ranks, parameters) that so many ranks would have, computed by one process in fp32."""
    model, found = build(MODEL), []
    x, y = _rows(ranks * rows)
    for i in range(ranks):
        mine = slice(i * rows, (i + 1) * rows)
        grads = torch.autograd.grad(model(x[mine], y[mine]), list(model.parameters()))
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(found)


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
    return _off(total.float(), gradients.sum(0))


def _reduced(reduce_dtype: str, rows: int) -> torch.Tensor:
    rank, wrapped = dist.get_rank(), _wrapped(reduce_dtype=reduce_dtype)
    x, y = _rows(rows, rank * rows)
    wrapped.model(x, y).backward()
    return _gradients(wrapped)


def reduce_in_bf16(ranks: int, rows: int = 2) -> float:
    """The relative error of FSDP2's reduced gradients with ``reduce_dtype=bf16``, by those with fp32, on real ranks."""

    def both() -> float:
        return _off(_reduced("bf16", rows), _reduced("fp32", rows))

    return processes.run(both, ranks, threads=1, timeout_s=60, progress=False)[0]


def reduction(real: Sequence[int] = (2, 4, 8), added: Sequence[int] = (2, 4, 8, 16, 32, 64)) -> list[Row]:
    """Predicted from the gradients of two ranks; measured with FSDP2 and, for more ranks, by adding in one process."""
    gradients = gradients_of(max(added))
    name, quantity = "reduce_dtype=bf16, {}", "error of the gradient"
    rows = [
        Row(name.format(n_ranks(n)), quantity, predict_reduction(gradients[:2], n), reduce_in_bf16(n), "relative")
        for n in real
    ]
    return rows + [
        Row(
            name.format(f"{n} gradients added here"), quantity,
            predict_reduction(gradients[:2], n), add_in_bf16(gradients[:n]), "relative",
        )
        for n in added
    ]  # fmt: skip


# ---- What fp16 cannot hold ------------------------------------------------------------------------------------------


def predict_vanished(n_tokens: int, scale: float = 1.0) -> float:
    """The share of the logits' gradients that are 0 in fp16, before anything has been learnt.

    The loss is a mean over the tokens of all ranks. Of each, the gradient of a wrong logit is then 1 / (vocabulary
    x tokens), that of the right one about 1 / tokens.
    """
    vocabulary = MODEL.vocab_size
    wrong, right = (scale / (n_tokens * n) <= FP16_SMALLEST / 2 for n in (vocabulary, 1))
    return (wrong * (vocabulary - 1) + right) / vocabulary


def vanished(n_tokens: int, scale: float = 1.0) -> float:
    """The same, by backward through logits in fp16 on this rank's rows of a batch of ``n_tokens``."""
    x, y = _rows(4)
    with torch.no_grad():
        logits = build(MODEL)(x)
    logits = logits.half().requires_grad_()
    (loss_of(logits, y, "sum") * (scale / n_tokens)).backward()
    assert logits.grad is not None
    return float((logits.grad == 0).float().mean())


def fp16(n_tokens: int = 2**19) -> list[Row]:
    """Without a scaler and with one. (The trainer has fp16 on GPUs only: CPUs compute it slowly, if at all.)"""
    return [
        Row(f"fp16, {name}", "gradients lost", predict_vanished(n_tokens, s), vanished(n_tokens, s), "of 1")
        for name, s in (("no scaler", 1.0), (f"scaled by {SCALE:,.0f}", SCALE))
    ]


# ---- Accumulation ---------------------------------------------------------------------------------------------------


def _accumulate(sync: bool | str, micro_batches: int) -> tuple[torch.Tensor, int]:
    rank, wrapped = dist.get_rank(), _wrapped(requires_gradient_sync=sync)
    batches = [_rows(2, (rank * micro_batches + i) * 2) for i in range(micro_batches)]
    with live_bytes(wrapped.model) as meter:
        before = meter.live_bytes
        for i, (x, y) in enumerate(batches):
            with wrapped.micro_batch(is_last=i == micro_batches - 1):
                (wrapped.model(x, y) / micro_batches).backward()
            if i == 0:
                _reshard(wrapped)
                kept = meter.live_bytes - before
    return _gradients(wrapped), kept


def _reshard(wrapped: Wrapped) -> None:
    root: Any = wrapped.model
    root.reshard()  # the root keeps what it gathered; here only gradients are to be counted


def accumulation(ranks: int = 4, micro_batches: int = 4) -> list[Row]:
    """FSDP2, reducing in every micro-batch or in the last: bytes sent in a step, bytes kept between two micro-batches.

    Whole gradients are parameters x 4 bytes, a rank's part of them a share of it. With the reduced ones FSDP2 keeps the
    buffer that it sent last, the root's, until the last micro-batch: the next reduction waits for it.
    """
    model = build(MODEL)
    whole_bytes = 4 * model.num_params()
    root_bytes = whole_bytes - 4 * sum(p.numel() for p in model.layers.parameters())
    rows, gradients = [], []
    for sync, sent, kept_bytes in (
        (True, micro_batches, whole_bytes / ranks + root_bytes),
        ("last", 1, whole_bytes),
    ):
        ran = processes.run(_accumulate, ranks, sync, micro_batches, threads=1, timeout_s=60, progress=False)
        reduced = [e for e in ran.timeline.ops if e.rank == 0 and e.op is Op.REDUCE_SCATTER]
        name = f"requires_gradient_sync={str(sync).lower()}"
        gradients.append(ran[0][0])
        rows += [
            Row(name, "gradients sent", whole_bytes * sent / 1e6, sum(e.bytes for e in reduced) / 1e6, "MB"),
            Row(name, "gradients kept", kept_bytes / 1e6, ran[0][1] / 1e6, "MB"),
        ]
    return [*rows, Row("true or last", "difference of the gradients", None, _off(*gradients), "relative")]


# ---- Clipping -------------------------------------------------------------------------------------------------------


def _clip(api: str, own_shards: bool, max_norm: float) -> tuple[float, float]:
    """The norm that this rank clips with, and the norm of all ranks' gradients afterwards."""
    rank, wrapped = dist.get_rank(), _wrapped(api=api)
    x, y = _rows(2, rank * 2)
    wrapped.model(x, y).backward()
    if own_shards:
        took = torch.nn.utils.clip_grad_norm_(wrapped.model.parameters(), max_norm)
    else:
        took = wrapped.clip_grad_norm(max_norm)
    return float(took), float(wrapped.clip_grad_norm(None))


WAYS_TO_CLIP = {
    "FSDP2, DTensors": ("fsdp2", False),
    "FSDP1, the wrapper's": ("fsdp1", False),
    "FSDP1, torch.nn.utils": ("fsdp1", True),
}


def _clip_all(max_norm: float) -> list[tuple[float, float]]:
    return [_clip(api, own_shards, max_norm) for api, own_shards in WAYS_TO_CLIP.values()]


def clipping(ranks: int = 4, max_norm: float = 0.1) -> list[Row]:
    """Right with FSDP2 and FSDP1, and wrong with FSDP1's own shards in ``torch.nn.utils.clip_grad_norm_``.

    A rank that clips by its own shards makes their norm ``max_norm``: together all have the root of their number times
    as much, and each has scaled its part of the gradient by another factor. No rank is told.
    """
    norm = float(gradients_of(ranks).mean(0).norm())  # of the whole batch, by one process
    ran = processes.run(_clip_all, ranks, max_norm, threads=1, timeout_s=60, progress=False)
    rows = []
    for (name, (_, own_shards)), *of_ranks in zip(WAYS_TO_CLIP.items(), *ran, strict=True):
        took = [norm_of_rank for norm_of_rank, _ in of_ranks]
        if own_shards:
            rows += [Row(name, f"norm, as rank {rank} sees it", norm, seen, "") for rank, seen in enumerate(took)]
        else:
            rows.append(Row(name, "norm, as all ranks see it", norm, took[0], ""))
        after = max_norm * math.sqrt(ranks) if own_shards else max_norm
        rows.append(Row(name, f"norm, clipped to {max_norm:g}", after, of_ranks[0][1], ""))
    return rows


# ---- Unequally many tokens ------------------------------------------------------------------------------------------


def _uneven(per_token: bool, of_ranks: Sequence[int]) -> torch.Tensor:
    rank, wrapped = dist.get_rank(), _wrapped()
    x, y = _rows(4, rank * 4)
    y = y.flatten().index_fill(0, torch.arange(of_ranks[rank], y.numel()), IGNORED).view_as(y)
    if per_token:
        loss = wrapped.model(x, y, reduction="sum") * (wrapped.replicas / sum(of_ranks))
    else:
        loss = wrapped.model(x, y)
    loss.backward()
    return _gradients(wrapped)


def _alone(n_tokens: int, rank: int) -> torch.Tensor:
    """The gradient of the sum over a rank's tokens, by one process."""
    model = build(MODEL)
    x, y = _rows(4, rank * 4)
    y = y.flatten().index_fill(0, torch.arange(n_tokens, y.numel()), IGNORED).view_as(y)
    model(x, y, reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def tokens(of_ranks: Sequence[int] = (240, 24)) -> list[Row]:
    """What a token counts on each rank, in units of what it should: with the loss per token, and with a mean of means.

    Args:
        of_ranks: tokens that each rank learns from, at most 4 rows of them.
    """
    n_tokens, ranks = sum(of_ranks), len(of_ranks)
    alone = torch.stack([_alone(n, rank) for rank, n in enumerate(of_ranks)]).double()
    right = alone.sum(0) / n_tokens
    rows = []
    for name, per_token in (("sum / tokens of all ranks", True), ("mean of the ranks' means", False)):
        ran = processes.run(_uneven, ranks, per_token, tuple(of_ranks), threads=1, timeout_s=60, progress=False)
        counts = torch.linalg.lstsq(alone.T, ran[0].double()[:, None]).solution[:, 0] * n_tokens
        rows += [
            Row(name, f"weight of each of {n} tokens", 1.0 if per_token else n_tokens / ranks / n, float(count), "")
            for n, count in zip(of_ranks, counts, strict=True)
        ]
        rows.append(Row(name, "error of the gradient", None, _off(ran[0].double(), right), "relative"))
    return rows


# ---- Training -------------------------------------------------------------------------------------------------------


def losses(ranks: int = 2, steps: int = 10) -> dict[str, list[float]]:
    """The trainer's losses by ``param_dtype``, under torchrun; fp16 where each rank has a GPU.

    Raises:
        FailedError: a run failed.
    """
    return {
        dtype: train(f"--param_dtype={dtype}", f"--steps={steps}", "--global_batch=16", ranks=ranks).losses
        for dtype in _dtypes(_device(ranks))
    }


def _dtypes(device: torch.device) -> list[str]:
    return ["fp32", "bf16", *(["fp16"] if device.type == "cuda" else [])]


def _device(ranks: int) -> torch.device:
    """Where the trainer runs."""
    return find_device("auto", Place(0, ranks, 0, ranks))


def compare_losses(curves: dict[str, list[float]]) -> list[Row]:
    """The last losses, and how far one is at most from that of fp32."""
    rows = [Row(f"param_dtype={dtype}", "last loss", None, of[-1], "nats") for dtype, of in curves.items()]
    for dtype in [dtype for dtype in curves if dtype != "fp32"]:
        worst = max(abs(a / b - 1) for a, b in zip(curves[dtype], curves["fp32"], strict=True))
        rows.append(Row(f"param_dtype={dtype}", "furthest from fp32's", None, worst, "relative"))
    return rows


# ---- The lab --------------------------------------------------------------------------------------------------------


def run(ranks: int = 4, steps: int = 10) -> Result:
    """All of it.

    Raises:
        FailedError: a training failed.
    """
    rows = [*reduction(), *fp16(), *accumulation(ranks), *clipping(ranks), *tokens(), *compare_losses(losses(2, steps))]
    device = _device(2)
    notes = (
        f"The losses are those of the trainer on {device.type} ({', '.join(_dtypes(device))}; fp16 is for GPUs). All "
        f"else was measured on {n_ranks(ranks)}, or as many as it says, on CPU cores with gloo.",
    )
    return Result("numerics", "measured", tuple(rows), this_machine(device, 2), notes=notes)


def reduction_picture(rows: Sequence[Row]) -> Picture:
    """The error by the number of ranks: predicted as a line, measured as marks, and the rounding of one number."""
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
        x=1, xref="paper", y=math.log10(BF16_UNIT), text="2⁻⁸: rounding one number, at worst", showarrow=False,
        xanchor="right", yanchor="top",
    )  # fmt: skip
    worst = max(abs(row.error or 0.0) for _, row in found)
    finding = f"The prediction is within {worst:.0%} of every measurement."
    cells = tuple((row.name, f"{row.predicted:.5f}", f"{row.measured:.5f}") for _, row in found)
    return Picture(figure, finding, (Table("relative error", ("", "predicted", "measured"), cells),))


def main(ranks: int = 4, steps: int = 10) -> int:
    """Predict and measure; prints one table.

    Args:
        ranks: of the experiments on accumulation and clipping, at least 2 and dividing 128.
        steps: of the trainings.
    """
    if ranks < 2 or 128 % ranks or steps < 1:
        print(f"labs.lab.numerics: ranks={ranks}, steps={steps}: ranks is 2, 4, 8, ... up to 64, and steps at least 1",
              file=sys.stderr)  # fmt: skip
        return 2
    try:
        result = run(ranks, steps)
    except FailedError as failure:
        print(f"labs.lab.numerics: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    console = Console()
    console.print(result.table())
    for note in result.notes:
        console.print(note)
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
