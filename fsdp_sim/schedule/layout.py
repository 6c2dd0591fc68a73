"""The dtypes and bytes of one unit's parameters, all-gather and reduction, computed once per program.

The rules are those of torch's ``FSDPParam.init_dtype_attrs`` and ``_get_gradient_divide_factors`` (torch 2.13).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_sim.schedule.mesh import Mesh
from fsdp_sim.schedule.unit import Param, Unit
from fsdp_sim.spec import DTYPE_BYTES, Plan


@dataclass(frozen=True)
class Division:
    """How a sum of gradients becomes their mean.

    Attributes:
        before, after: factors that I is divided by before, and O after the reduction; None or 1 is no division.
        reduce_scatter_op, all_reduce_op: what the collectives compute.
        given: the factor that was set explicitly, or None.
    """

    before: float | None
    after: float | None
    reduce_scatter_op: str
    all_reduce_op: str
    given: float | None = None


def division_of(reduce_dtype: str, factor: float | None, shards: int, replicas: int) -> Division:
    """Inside the collective where the dtype allows; fp16 may overflow, so half of the division comes before the sum.

    Args:
        factor: `Plan.gradient_divide_factor`.
        shards, replicas: ranks of the reduce-scatter and of the all-reduce.
    """
    ranks = shards * replicas
    if reduce_dtype in ("fp32", "bf16"):
        if factor is None:
            op = "AVG" if ranks > 1 else "SUM"
            return Division(None, None, op, op)
        return Division(None, None, "AVG" if factor == shards else f"PREMUL_SUM({1 / factor})", "SUM", factor)
    divide_by = float(ranks) if factor is None else factor
    before = 1
    while divide_by % before == 0 and divide_by / before > before:
        before *= 2
    return Division(before, divide_by / before, "SUM", "SUM", factor)


@dataclass(frozen=True)
class Layout:
    """Bytes and dtypes of one unit whose parameters are sharded over ``shards`` ranks.

    Attributes:
        param_bytes: of each whole parameter, padded, in the dtype it is gathered in.
        cast, casts: for each parameter, whether its shard is cast before the gather; whether any is.
        own_casts: parameters that are cast by themselves, because they are gathered in a dtype of their own.
        shard_bytes: of each parameter's shard on one rank, as it is stored.
        gather_bytes: all whole parameters: of G, and of U.
        gather_dtype: of G; ``uint8`` where the parameters' dtypes differ.
        trained: indices of the parameters that require gradients.
        grad_dtype: what autograd computes gradients in.
        upcast_dtype: what whole gradients are kept in while they are accumulated without sync; None: as they are.
        reduce_dtype, reduce_bytes: of I; O has ``reduce_bytes / shards``.
        orig_dtype: of the shards, hence of sharded gradients.
        grad_bytes: of each whole gradient, not padded: (parameter, bytes).
        division: how its gradients become means.
        by_columns: its parameters are sharded along dimension 1.
    """

    param_bytes: tuple[int, ...]
    cast: tuple[bool, ...]
    casts: bool
    own_casts: tuple[int, ...]
    shard_bytes: tuple[int, ...]
    gather_bytes: int
    gather_dtype: str
    trained: tuple[int, ...]
    grad_dtype: str
    upcast_dtype: str | None
    reduce_dtype: str
    reduce_bytes: int
    orig_dtype: str
    grad_bytes: tuple[tuple[int, int], ...]
    division: Division
    by_columns: bool = False


def layout_of(unit: Unit, plan: Plan, mesh: Mesh) -> Layout:
    """The layout of a unit that has parameters.

    Gradients of experts, which all ranks' tokens have reached, become means over all ranks, not over those of the mesh.

    Raises:
        ValueError: it trains parameters of several dtypes, which one reduce-scatter cannot take.
    """
    params, param_dtype, shards = unit.params, plan.param_dtype, mesh.shards
    factor = plan.gradient_divide_factor
    if factor is None and mesh.expert_parallel > 1:
        factor = float(mesh.shards * mesh.expert_parallel * mesh.replicas)
    orig_dtype = _dtype_of_trained(unit, params)
    grad_dtype = param_dtype or orig_dtype
    reduce_dtype = plan.reduce_dtype or (orig_dtype if plan.torch == "2.15" else grad_dtype)
    param_bytes, shard_bytes, cast, whole, grad_bytes = [], [], [], [], []
    reduce_numel = 0
    for k, p in enumerate(params):
        dtype = p.gather_dtype or param_dtype or p.dtype
        numel = mesh.padded_numel(p)
        param_bytes.append(numel * DTYPE_BYTES[dtype])
        shard_bytes.append(numel // shards * DTYPE_BYTES[p.dtype])
        cast.append(dtype != p.dtype)
        whole.append(dtype)
        if p.requires_grad:
            grad_bytes.append((k, math.prod(p.shape) // mesh.expert_parallel * DTYPE_BYTES[grad_dtype]))
            reduce_numel += numel
    return Layout(
        param_bytes=tuple(param_bytes),
        cast=tuple(cast),
        casts=any(cast),
        own_casts=tuple(k for k, p in enumerate(params) if p.gather_dtype),
        shard_bytes=tuple(shard_bytes),
        gather_bytes=sum(param_bytes),
        gather_dtype=whole[0] if len(set(whole)) == 1 else "uint8",
        trained=tuple(k for k, _ in grad_bytes),
        grad_dtype=grad_dtype,
        upcast_dtype=reduce_dtype if reduce_dtype != grad_dtype else None,
        reduce_dtype=reduce_dtype,
        reduce_bytes=reduce_numel * DTYPE_BYTES[reduce_dtype],
        orig_dtype=orig_dtype,
        grad_bytes=tuple(grad_bytes),
        division=division_of(reduce_dtype, factor, shards, mesh.replicas),
        by_columns=any(mesh.by_columns(p) for p in params),
    )


def _dtype_of_trained(unit: Unit, params: tuple[Param, ...]) -> str:
    dtypes = {p.dtype for p in params if p.requires_grad}
    if len(dtypes) > 1:
        raise ValueError(
            f"unit {unit.name} trains parameters of dtypes {', '.join(sorted(dtypes))}; one reduce-scatter needs one "
            f"dtype"
        )
    return dtypes.pop() if dtypes else params[0].dtype
