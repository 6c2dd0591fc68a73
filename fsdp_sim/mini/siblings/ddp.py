"""DistributedDataParallel in miniature: every rank holds the whole model and computes with its part of the batch.

Three things make the ranks train as one process with the whole batch would:

    at construction    rank 0's parameters and buffers are copied to all
    in backward        gradients are averaged in buckets, while backward computes the next ones: see `buckets`
    in the optimizer   nothing: equal parameters and equal gradients make equal parameters

Per parameter a rank holds 4 bytes of it, 4 of its gradient and 8 of AdamW's state (fp32), however many ranks there are.
ZeRO and FSDP are about those 16 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_sim.mini.siblings.buckets import Bucket, Reducer, assign_to_buckets
from fsdp_sim.mini.siblings.collectives import broadcast, default_group
from fsdp_sim.mini.siblings.watch import watch

MIB = 1024 * 1024


class DistributedDataParallel(nn.Module):
    """Wraps a module so that backward averages its gradients over the ranks.

    Source: `torch.nn.parallel.DistributedDataParallel`, whose arguments, keys of the state dict (``module.``) and
    numbers these are. Parameters that are frozen when this is called stay out of it.

    Args:
        module: of the same structure on every rank.
        process_group: all ranks by default.
        bucket_cap_mb: MiB at which a bucket is full; None means 25, and 1 for the first.
        find_unused_parameters: a gradient that this rank did not compute counts as zero; one that no rank computed
            stays None. It costs one more all-reduce per backward, and overlap: torch looks in the graph after forward
            which parameters will get none, this version sees at the end of backward which did not. If False, a
            gradient that does not come is an error.
        broadcast_buffers: copy rank 0's buffers (running means) to all before each forward.

    Raises:
        RuntimeError: there is no process group; no parameter needs a gradient; parameters are on the meta device; ranks
            have different parameters. In backward: a parameter got no gradient.
        ValueError: ``bucket_cap_mb`` is not positive.

    Example::

        model = DistributedDataParallel(Transformer())
        optimizer = torch.optim.AdamW(model.parameters())
        for i, batch in enumerate(micro_batches):
            with model.no_sync() if i < len(micro_batches) - 1 else nullcontext():
                loss(model(batch)).backward()
        optimizer.step()
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
    ) -> None:
        super().__init__()
        names = {p: name for name, p in module.named_parameters() if p.requires_grad}
        group = default_group(process_group)
        _validate(module, names, group, bucket_cap_mb)
        self.module = module
        self.process_group = group
        self.broadcast_buffers = broadcast_buffers
        self.require_backward_grad_sync = True
        broadcast_all([*module.parameters(), *module.buffers()], group, "root")
        first_mb, cap_mb = (1.0, 25.0) if bucket_cap_mb is None else (bucket_cap_mb, bucket_cap_mb)
        assigned = assign_to_buckets(list(names), int(cap_mb * MIB), int(first_mb * MIB))
        self.reducer = Reducer([Bucket(i, of) for i, of in enumerate(assigned)], names, group, find_unused_parameters)
        watch(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.reducer.sync = self.require_backward_grad_sync
            if self.broadcast_buffers and self.require_backward_grad_sync:
                broadcast_all(list(self.module.buffers()), self.process_group, "buffers")
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without communication: for all micro-batches but the last.

        As in torch it is forward that has to run inside.
        """
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


@torch.no_grad()
def broadcast_all(tensors: list[torch.Tensor], group: ProcessGroup, unit: str) -> None:
    """Copy rank 0's values to all ranks."""
    for pending in [broadcast(t.detach(), group, unit) for t in tensors]:
        pending.wait()


def validate_same_on_all_ranks(mine: list[Any], group: ProcessGroup) -> None:
    """Compare a list, one entry per parameter, with rank 0's: ranks that differ would wait for each other for ever.

    Raises:
        RuntimeError: it differs; on every rank.
    """
    theirs: list[Any] = [mine] * group.size()
    if group.size() > 1:
        dist.all_gather_object(theirs, mine, group=group)
    for rank, of_rank in enumerate(theirs):
        for expected, found in zip_longest(theirs[0], of_rank):
            if expected != found:
                raise RuntimeError(
                    f"rank 0 has the parameter {expected} where rank {rank} has {found}; build the same model on every "
                    "rank"
                )


def _validate(
    module: nn.Module, names: dict[nn.Parameter, str], group: ProcessGroup, bucket_cap_mb: float | None
) -> None:
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb}: must be above 0, for example 25")
    if not names:
        raise RuntimeError(f"no parameter of {type(module).__name__} needs a gradient, so there is nothing to average")
    if on_meta := [name for name, p in module.named_parameters() if p.is_meta]:
        raise RuntimeError(
            f"parameters are still on the meta device: {on_meta}; call module.to_empty(device=...) and initialize them"
        )
    validate_same_on_all_ranks([(name, tuple(p.shape), p.dtype) for p, name in names.items()], group)
