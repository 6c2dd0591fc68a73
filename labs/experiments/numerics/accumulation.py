"""Reduce in each micro-batch, or in the last one only: the same numbers, bytes sent for bytes kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim import ranks as processes
from fsdp_sim.measure import live_bytes
from fsdp_sim.timeline import Op
from labs.experiments.numerics.small_training import MODEL, gradients_whole, off, rows_of, spread
from labs.experiments.result import ResultRow
from labs.model import build
from labs.wrapping import Wrapped


def _accumulate(sync: bool | str, micro_batches: int) -> tuple[torch.Tensor, int]:
    rank, wrapped = dist.get_rank(), spread(requires_gradient_sync=sync)
    batches = [rows_of(2, (rank * micro_batches + i) * 2) for i in range(micro_batches)]
    with live_bytes(wrapped.model) as meter:
        before = meter.live_bytes
        for i, (x, y) in enumerate(batches):
            with wrapped.micro_batch(is_last=i == micro_batches - 1):
                (wrapped.model(x, y) / micro_batches).backward()
            if i == 0:
                _reshard(wrapped)
                kept = meter.live_bytes - before
    return gradients_whole(wrapped), kept


def _reshard(wrapped: Wrapped) -> None:
    root: Any = wrapped.model
    root.reshard()  # the root keeps what it gathered; here only gradients are to be counted


def accumulation(ranks: int = 4, micro_batches: int = 4) -> list[ResultRow]:
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
            ResultRow(name, "gradients sent", whole_bytes * sent / 1e6, sum(e.bytes for e in reduced) / 1e6, "MB"),
            ResultRow(name, "gradients kept", kept_bytes / 1e6, ran[0][1] / 1e6, "MB"),
        ]
    return [*rows, ResultRow("true or last", "difference of the gradients", None, off(*gradients), "relative")]
