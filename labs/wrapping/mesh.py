"""Which ranks share one copy of the parameters, and which have copies of the same shards."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from labs.cluster.process_group import RankPlace, n_ranks
from labs.config import TrainConfig


def is_hybrid(config: TrainConfig) -> bool:
    """Whether there are several copies of the sharded parameters (HSDP)."""
    return config.api == "hsdp" or (config.api == "fsdp1" and "HYBRID" in config.plan.sharding_strategy)


def shard_size(config: TrainConfig, place: RankPlace) -> int:
    """Ranks that share one copy of the parameters.

    With hybrid sharding by default those of one node, whose links are the fastest; on a single node half of them.

    Raises:
        ValueError: a size that does not divide the ranks, or an odd number of ranks and no size given.
    """
    ranks, wanted = place.world_size, config.plan.shard_size
    if not is_hybrid(config) or ranks == 1:
        return ranks
    if wanted is None and place.local_world_size < ranks:
        wanted = place.local_world_size
    elif wanted is None and ranks % 2 == 0:
        wanted = ranks // 2
    if wanted is None or ranks % wanted:
        sizes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        groups = f"groups of {wanted}" if wanted else "two halves"
        raise ValueError(
            f"shard_size={config.plan.shard_size or 'none'}: {ranks} ranks do not divide into {groups}; "
            f"give shard_size one of {sizes}"
        )
    return wanted


def make_mesh(config: TrainConfig, place: RankPlace, device: torch.device) -> DeviceMesh:
    """1-D: all ranks shard. 2-D with hybrid sharding: rows are copies, a row's ranks share one. A collective call."""
    shards = shard_size(config, place)
    if is_hybrid(config):
        ranks = torch.arange(place.world_size).view(-1, shards)
        # Groups of our own: those of init_device_mesh would wait for a rank that hangs for 30 minutes, torch's default.
        timeout = timedelta(seconds=config.timeout_s)
        groups: list[Any] = [
            dist.new_subgroups_by_enumeration(lines.tolist(), timeout=timeout)[0] for lines in (ranks.T, ranks)
        ]
        return DeviceMesh.from_group(groups, device.type, ranks, mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device.type, (shards,), mesh_dim_names=("shard",))


def mesh_label(mesh: DeviceMesh) -> str:
    if mesh.ndim == 2:
        copies = "1 copy" if mesh.size(0) == 1 else f"{mesh.size(0)} copies, each"
        return f"{copies} shared by {n_ranks(mesh.size(1))}"
    return f"shared by {n_ranks(mesh.size())}"
