"""The mesh: with whom a rank shares its shards, and, in hybrid sharding (HSDP), who holds the same shard.

[Note: two dimensions]  On a 1-D mesh of W ranks every rank holds 1/W. On a 2-D mesh of R x W ranks, usually nodes x
GPUs of a node, each row of the mesh is such a group and the R rows hold the same: parameters are gathered within a
row, gradients are reduce-scattered within a row and then all-reduced down the columns, which cross nodes but carry
only 1/W of the bytes.

    mesh            [[0, 1],      shard group of rank 1:      0, 1
                     [2, 3]]      replicate group of rank 1:  1, 3

[Note: a smaller mesh after forward]  ``reshard_after_forward=n`` cuts all ranks into groups of n neighbours (the GPUs
of a node); between forward and backward each of them holds 1/n.
"""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard


class FSDPMeshInfo:
    """A mesh from the point of view of this rank (torch: `_fsdp_common.FSDPMeshInfo`, `HSDPMeshInfo`).

    Attributes:
        placements: of a sharded parameter on the mesh.
        replicate_process_group: the ranks that hold the same shard; None on a 1-D mesh.
        reduce_scatter_process_group: set by ``set_separate_reduce_scatter_group``, else None.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.placements: tuple[Placement, ...] = (Shard(0),) if mesh.ndim == 1 else (Replicate(), Shard(0))
        self.shard_process_group = mesh.get_group(mesh.ndim - 1)
        self.shard_mesh_size: int = self.shard_process_group.size()
        self.shard_mesh_rank: int = self.shard_process_group.rank()
        self.replicate_process_group = mesh.get_group(0) if mesh.ndim == 2 else None
        self.reduce_scatter_process_group: dist.ProcessGroup | None = None

    @property
    def replicate_mesh_size(self) -> int:
        return 1 if self.replicate_process_group is None else self.replicate_process_group.size()


def get_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """Check the user's mesh; by default all ranks, on the accelerator if there is one.

    Raises:
        ValueError: more than 2 dimensions.
        AssertionError: 2 dimensions without names (torch's type).
    """
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()  # finds the ranks that torchrun started
        return init_device_mesh(_default_device_type(), (dist.get_world_size(),))
    if mesh.ndim not in (1, 2):
        raise ValueError(f"fully_shard takes a mesh of 1 or 2 dimensions, but got {mesh.ndim}: {mesh}")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise AssertionError(
            f'a 2-D mesh needs names for its dimensions: init_device_mesh(..., mesh_dim_names=("replicate", "shard")), '
            f"but got {mesh}"
        )
    return mesh


def _default_device_type() -> str:
    return torch._C._get_accelerator().type  # as torch's `_init_default_mesh` asks: "cpu" where there is none


def post_forward_mesh_info(reshard_after_forward: bool | int, mesh_info: FSDPMeshInfo) -> FSDPMeshInfo | None:
    """The mesh that holds a unit's parameters between forward and backward; None if they stay whole.

    Raises:
        ValueError: neither bool nor int, or an int that does not divide the number of shards.
    """
    n, n_shards = reshard_after_forward, mesh_info.shard_mesh_size
    if isinstance(n, bool):
        return mesh_info if n else None
    if not isinstance(n, int):
        raise ValueError(f"reshard_after_forward must be True, False, None or an int, not {n!r}")
    if n < 1 or n_shards % n:
        raise ValueError(f"reshard_after_forward as an int must divide the number of shards, {n_shards}, but is {n}")
    if n == 1:
        warnings.warn(
            "reshard_after_forward=1 keeps whole parameters on every rank, as False does; to free them pass True",
            stacklevel=3,
        )
        return None
    return mesh_info if n == n_shards else _smaller_mesh_info(mesh_info.mesh, n)


def _smaller_mesh_info(mesh: DeviceMesh, n: int) -> FSDPMeshInfo:
    cache = mesh.__dict__.setdefault("_fsdp_mini_smaller", {})  # new process groups cost: once per mesh, not per unit
    if n not in cache:
        cache[n] = FSDPMeshInfo(DeviceMesh(mesh.device_type, mesh.mesh.view(-1, n)))
    return cache[n]


def set_separate_reduce_scatter_group(mesh_infos: list[FSDPMeshInfo], enable: bool) -> None:
    """Give reduce-scatter a communicator of its own, one for all meshes over the same ranks, or take it away again."""
    new_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for info in mesh_infos:
        if not enable:
            info.reduce_scatter_process_group = None
            continue
        ranks = tuple(dist.get_process_group_ranks(info.shard_process_group))
        if ranks not in new_groups:
            new_groups[ranks] = info.reduce_scatter_process_group or dist.new_group(
                list(ranks), use_local_synchronization=True, group_desc="fsdp_reduce_scatter"
            )
        info.reduce_scatter_process_group = new_groups[ranks]
