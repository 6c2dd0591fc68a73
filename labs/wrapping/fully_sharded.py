"""fsdp2, hsdp and mini: fully_shard. They differ in whose fully_shard it is and in the mesh, in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import fsdp_sim.mini
from labs.config import TrainConfig
from labs.wrapping.base import Job, Wrapped
from labs.wrapping.mesh import make_mesh, mesh_label
from labs.wrapping.meta_init import materialise_shards
from labs.wrapping.precision import dtypes_label, policy_of

FULLY_SHARD: dict[str, Callable[..., Any]] = {
    "fsdp2": torch.distributed.fsdp.fully_shard,
    "hsdp": torch.distributed.fsdp.fully_shard,
    "mini": fsdp_sim.mini.fully_shard,
}


def wrap_fully_sharded(job: Job) -> Wrapped:
    """Each unit, innermost first, then the root. Parameters become DTensors, cut on dim 0, and keep their names."""
    config, model, device = job.config, job.model, job.device
    mesh = job.mesh or make_mesh(config, job.place, device)
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": config.plan.reshard_after_forward}
    if (policy := policy_of(config)) is not None:
        options["mp_policy"] = policy
    if config.plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    units: list[Any] = job.units.modules(model)
    for unit in reversed(units):  # named_modules has the outer ones first
        FULLY_SHARD[config.api](unit, **options)
    FULLY_SHARD[config.api](model, **options)
    prefetch(units, config)
    if config.meta_init:
        materialise_shards(model, job.plain, config.seed, device, host=config.plan.cpu_offload)
    # torch's GradScaler: with DTensors its unscale_ reduces found_inf over the mesh, so all ranks skip or none.
    scaler = torch.amp.GradScaler(device.type) if config.plan.param_dtype == "fp16" else None
    label = f"{config.api}: {mesh_label(mesh)}, {job.units}, {dtypes_label(config)}"
    last_only = config.plan.requires_gradient_sync == "last"
    return FullySharded(config.api, model, job.shapes, mesh.size(), label, last_only, scaler=scaler)


def prefetch(units: list[Any], config: TrainConfig) -> None:
    """Explicit prefetch of depth k: each unit gathers the k units that follow it (in backward: precede it).

    The root has no list: it is gathered first anyway, and its own forward is around all others.
    """
    for depth, method in (
        (config.plan.forward_prefetch, "set_modules_to_forward_prefetch"),
        (config.plan.backward_prefetch, "set_modules_to_backward_prefetch"),
    ):
        if depth is None:
            continue
        order = units if "forward" in method else units[::-1]
        for i, unit in enumerate(order):
            getattr(unit, method)(order[i + 1 : i + 1 + int(depth)])


@dataclass
class FullySharded(Wrapped):
    """``last_only``: whole gradients stay on every rank until the last micro-batch, then they are reduced once."""

    last_only: bool

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        model: Any = self.model
        if self.last_only:
            model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)  # until then, compute does not wait for the last reduce-scatters
        yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        with super().evaluation():
            yield
        for module in self.model.modules():  # without a backward, units that keep their parameters keep them gathered
            if hasattr(module, "reshard"):
                _reshard(module)


def _reshard(module: nn.Module) -> None:
    fsdp_module: Any = module
    fsdp_module.reshard()
