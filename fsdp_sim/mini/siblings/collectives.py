"""The four collectives that the siblings use: asynchronous, in the timeline, and nothing at all with one rank.

Each issues its collective and returns at once; whoever reads the result calls ``wait()`` on what it returns first. In
between gloo's threads (or NCCL's stream) work beside the computation that follows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp, Work

from fsdp_sim.mini.collectives import all_gather_single, reduce_scatter_single
from fsdp_sim.mini.recording import PendingCollective
from fsdp_sim.mini.siblings.watch import SEGMENTS
from fsdp_sim.timeline import Op


class NoWork:
    """What one rank would wait for: nothing."""

    seq = -1

    def wait(self) -> None:
        pass


Pending = PendingCollective | NoWork


def all_gather(whole: torch.Tensor, part: torch.Tensor, group: ProcessGroup, unit: str, waits_on: int = -1) -> Pending:
    """Every rank's ``part``, 1D: n, into ``whole``, 1D: W * n. ``part`` may be its own place in ``whole``."""
    if group.size() == 1:
        whole.copy_(part)
        return NoWork()
    return _issue(
        Op.ALL_GATHER, unit, whole, group, waits_on, lambda: all_gather_single(whole, part, group, async_op=True)
    )


def reduce_scatter(
    mean: torch.Tensor, whole: torch.Tensor, group: ProcessGroup, unit: str, waits_on: int = -1
) -> Pending:
    """The mean over the ranks of this rank's part of ``whole``, 1D: W * n, into ``mean``, 1D: n."""
    if group.size() == 1:
        mean.copy_(whole)
        return NoWork()
    return _issue(
        Op.REDUCE_SCATTER, unit, whole, group, waits_on,
        lambda: reduce_scatter_single(mean, whole, ReduceOp.AVG, group, async_op=True),
    )  # fmt: skip


def all_reduce(tensor: torch.Tensor, group: ProcessGroup, unit: str, op: ReduceOp.RedOpType = ReduceOp.AVG) -> Pending:
    """The mean (or another ``op``) over the ranks, in place."""
    if group.size() == 1:
        return NoWork()
    return _issue(
        Op.ALL_REDUCE, unit, tensor, group, -1, lambda: dist.all_reduce(tensor, op=op, group=group, async_op=True)
    )


def broadcast(tensor: torch.Tensor, group: ProcessGroup, unit: str) -> Pending:
    """Rank 0's values to all ranks, in place."""
    if group.size() == 1:
        return NoWork()
    source = dist.get_global_rank(group, 0)
    return _issue(
        Op.BROADCAST, unit, tensor, group, -1, lambda: dist.broadcast(tensor, source, group=group, async_op=True)
    )


def _issue(
    op: Op, unit: str, buffer: torch.Tensor, group: ProcessGroup, waits_on: int, issue: Callable[[], Work]
) -> PendingCollective:
    with SEGMENTS.pause() as computed:
        return PendingCollective(op, unit, buffer, group, max(computed, waits_on)).issue(issue)


def default_group(group: ProcessGroup | None) -> ProcessGroup:
    """The given group, or that of all ranks.

    Raises:
        RuntimeError: there is none.
    """
    if not dist.is_initialized():
        raise RuntimeError("there is no process group; call torch.distributed.init_process_group first")
    return group if group is not None else dist.group.WORLD  # type: ignore[return-value]
