"""The norm of all ranks' gradients, and what becomes of it when a rank clips by its own shards."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from fsdp_sim import ranks as processes
from labs.experiments.numerics.small_training import gradients_of, rows_of, spread
from labs.experiments.result import ResultRow


def _clip(api: str, own_shards: bool, max_norm: float) -> tuple[float, float]:
    """The norm that this rank clips with, and the norm of all ranks' gradients afterwards."""
    rank, wrapped = dist.get_rank(), spread(api=api)
    x, y = rows_of(2, rank * 2)
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


def clipping(ranks: int = 4, max_norm: float = 0.1) -> list[ResultRow]:
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
            rows += [ResultRow(name, f"norm, as rank {rank} sees it", norm, seen, "") for rank, seen in enumerate(took)]
        else:
            rows.append(ResultRow(name, "norm, as all ranks see it", norm, took[0], ""))
        after = max_norm * math.sqrt(ranks) if own_shards else max_norm
        rows.append(ResultRow(name, f"norm, clipped to {max_norm:g}", after, of_ranks[0][1], ""))
    return rows
