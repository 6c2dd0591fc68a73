"""fsdp1: FullyShardedDataParallel, which flattens each unit to one parameter and cuts that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import CustomPolicy

from labs.cluster.process_group import n_ranks
from labs.wrapping.base import Job, Wrapped
from labs.wrapping.mesh import make_mesh, mesh_label
from labs.wrapping.meta_init import fill_module
from labs.wrapping.precision import dtypes_label, fsdp1_policy_of


def wrap_fsdp1(job: Job) -> Wrapped:
    """A wrapper around each unit and the root.

    The mesh makes sharded state dicts consist of DTensors, as those of the other apis. With one rank, torch turns the
    strategy into NO_SHARD: nothing is cut, no collective runs.
    """
    config, model, device = job.config, job.model, job.device
    mesh = job.mesh or make_mesh(config, job.place, device)
    units = set(job.units.modules(model))
    prefetch = config.plan.backward_prefetch or "BACKWARD_PRE"
    fsdp = FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        device_id=device,
        sharding_strategy=ShardingStrategy[config.plan.sharding_strategy],
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        backward_prefetch=None if prefetch == "none" else BackwardPrefetch[str(prefetch)],
        forward_prefetch=bool(config.plan.forward_prefetch),
        limit_all_gathers=config.plan.limit_all_gathers,
        use_orig_params=config.use_orig_params,
        sync_module_states=config.sync_module_states,
        mixed_precision=fsdp1_policy_of(config),
        cpu_offload=CPUOffload(offload_params=config.plan.cpu_offload),
        param_init_fn=fill_module(model, job.plain, config.seed, device) if config.meta_init else None,
    )
    scaler = None
    if config.plan.param_dtype == "fp16":  # the plain one would look at this rank's shards only
        scaler = ShardedGradScaler(device.type, process_group=dist.group.WORLD)
    strategy = config.plan.sharding_strategy if mesh.size() > 1 else "NO_SHARD"
    where = f"a copy on each of {n_ranks(mesh.size())}" if strategy == "NO_SHARD" else mesh_label(mesh)
    label = f"fsdp1: {strategy}, {where}, {job.units}, {dtypes_label(config)}"
    # One rank has nothing to save by waiting, and torch's no_sync fails there with tied parameters in bf16.
    last_only = config.plan.requires_gradient_sync == "last" and mesh.size() > 1
    return Fsdp1("fsdp1", fsdp, job.shapes, mesh.size(), label, last_only, scaler=scaler)


@dataclass
class Fsdp1(Wrapped):
    """FSDP1; ``last_only``: whole gradients stay on every rank until the last micro-batch."""

    last_only: bool

    @property
    def _fsdp(self) -> FullyShardedDataParallel:
        assert isinstance(self.model, FullyShardedDataParallel)
        return self.model

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        if self.last_only and not is_last:
            with self._fsdp.no_sync():
                yield
        else:
            yield

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """As `Wrapped.clip_grad_norm`. torch.nn.utils would give the norm of this rank's shards."""
        return self._fsdp.clip_grad_norm_(math.inf if max_norm is None else max_norm)
