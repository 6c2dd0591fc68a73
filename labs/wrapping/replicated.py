"""The whole model on every rank: single (one process) and ddp (DistributedDataParallel)."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs.cluster.process_group import n_ranks
from labs.wrapping.base import Job, Wrapped
from labs.wrapping.meta_init import fill_module
from labs.wrapping.precision import autocast_forward, dtypes_label


def wrap_single(job: Job) -> Wrapped:
    """The model on the device, no collectives."""
    model, scaler = _on_device(job)
    return Wrapped("single", model, job.shapes, 1, f"single: one process, {dtypes_label(job.config)}", scaler=scaler)


def wrap_ddp(job: Job) -> Wrapped:
    """The model on every rank; gradients are averaged in buckets while backward runs.

    ``static_graph`` stays off: it is for reentrant checkpointing, and with it the first step may not accumulate.
    """
    model, scaler = _on_device(job)
    ddp = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,  # .grad is a view of the bucket: no second copy of the gradients
        **_NO_BUFFERS,  # they are tables that every rank computes alike
    )
    for part in (ddp.reducer, ddp.logger):
        weakref.finalize(part, _let_go, ddp.process_group).atexit = False
    label = f"ddp: a copy on each of {n_ranks(job.place.world_size)}, {dtypes_label(job.config)}"
    last_only = job.config.plan.requires_gradient_sync == "last"
    return Ddp("ddp", ddp, job.shapes, job.place.world_size, label, last_only, scaler=scaler)


def _let_go(group: dist.ProcessGroup | None) -> None:
    """Called after DDP's parts in C++ are gone, so that they are never the last to hold the group.

    Their destructor has the GIL. A gloo group's destructor waits for its threads, and one of them may wait for the GIL
    to let go of the last collective's tensor (ProcessGroupGloo::runLoop): a rank that never ends. Python's own
    reference gives the GIL away first. Seen with torch 2.11 and 2.13, on a busy machine, after the training.
    """


# torch 2.13 has a new name for what older ones call broadcast_buffers.
_NAMES = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers": False
}


@dataclass
class Ddp(Wrapped):
    """DDP; ``last_only``: gradients stay this rank's own until the last micro-batch."""

    last_only: bool

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        model = self.model
        assert isinstance(model, DistributedDataParallel)
        if self.last_only and not is_last:
            with model.no_sync():
                yield
        else:
            yield


def _on_device(job: Job) -> tuple[nn.Module, torch.amp.GradScaler | None]:
    model, config = job.model, job.config
    if config.meta_init:
        fill = fill_module(model, job.plain, config.seed, job.device)
        for module in model.modules():
            fill(module)
    model.to(job.device)
    autocast_forward(model, config, job.device)
    return model, torch.amp.GradScaler(job.device.type) if config.plan.param_dtype == "fp16" else None
