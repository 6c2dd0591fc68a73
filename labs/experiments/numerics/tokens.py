"""Ranks with unequally many tokens: a mean of means is not the mean."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_sim import ranks as processes
from labs.experiments.numerics.small_training import MODEL, gradients_whole, off, rows_of, spread
from labs.experiments.result import ResultRow
from labs.model import build
from labs.model.gpt import IGNORED


def _uneven(per_token: bool, of_ranks: Sequence[int]) -> torch.Tensor:
    rank, wrapped = dist.get_rank(), spread()
    x, y = rows_of(4, rank * 4)
    y = y.flatten().index_fill(0, torch.arange(of_ranks[rank], y.numel()), IGNORED).view_as(y)
    if per_token:
        loss = wrapped.model(x, y, reduction="sum") * (wrapped.replicas / sum(of_ranks))
    else:
        loss = wrapped.model(x, y)
    loss.backward()
    return gradients_whole(wrapped)


def _alone(n_tokens: int, rank: int) -> torch.Tensor:
    """The gradient of the sum over a rank's tokens, by one process."""
    model = build(MODEL)
    x, y = rows_of(4, rank * 4)
    y = y.flatten().index_fill(0, torch.arange(n_tokens, y.numel()), IGNORED).view_as(y)
    model(x, y, reduction="sum").backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def tokens(of_ranks: Sequence[int] = (240, 24)) -> list[ResultRow]:
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
            ResultRow(
                name, f"weight of each of {n} tokens", 1.0 if per_token else n_tokens / ranks / n, float(count), ""
            )
            for n, count in zip(of_ranks, counts, strict=True)
        ]
        rows.append(ResultRow(name, "error of the gradient", None, off(ran[0].double(), right), "relative"))
    return rows
