"""Mixed precision: which dtype is gathered, computed with, reduced in and kept.

[Note: four dtypes]

    original   the shards, their gradients after the reduction, the optimizer           float32
    param      all-gather, unsharded parameters, forward and backward                   bfloat16
    reduce     the reduce-scatter (and all-reduce) of the gradients                     float32
    output     what the module's forward returns

A rank keeps its shard in the original dtype anyway, so unlike autocast this needs no second copy of the weights, and
the all-gather sends half the bytes. ``None`` means "no cast".

[Note: dividing by the number of ranks]  The mean over N ranks is a sum divided by N. In float32 and bfloat16 the
collective divides (AVG). In float16 the sum of N gradients may overflow and gradient/N may underflow, so about sqrt(N)
divides before the sum and the rest after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _apply_to_tensors

from fsdp_sim.mini import versions
from fsdp_sim.mini.labels import record_step


def mixed_dtypes(
    policy: MixedPrecisionPolicy, orig_dtype: torch.dtype
) -> tuple[torch.dtype | None, torch.dtype | None]:
    """(param dtype, reduce dtype) of a parameter, None where no cast is needed.

    Raises:
        NotImplementedError: the policy has torch 2.15's ``param_dtype_override_fn``.
    """
    if getattr(policy, "param_dtype_override_fn", None) is not None:
        raise NotImplementedError(
            "this FSDP knows one param_dtype for a unit, not MixedPrecisionPolicy(param_dtype_override_fn=...); give "
            "modules that need another dtype a fully_shard call of their own"
        )
    reduce_dtype = None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
    if versions.GRADS_KEEP_ORIGINAL_DTYPE:
        reduce_dtype = policy.reduce_dtype or orig_dtype
    if policy.param_dtype == orig_dtype or not orig_dtype.is_floating_point:
        return None, reduce_dtype
    return policy.param_dtype, reduce_dtype


def dtypes_of_trainable(fsdp_params: list[Any], unit: str) -> tuple[torch.dtype | None, torch.dtype | None]:
    """(original dtype, reduce dtype) of a unit's gradients; None if all its parameters are frozen.

    Raises:
        AssertionError: trainable parameters of more than one dtype (torch's type): one collective, one dtype.
    """
    trainable = [p for p in fsdp_params if p.sharded_param.requires_grad]
    by_name = {p._param_fqn: p.orig_dtype for p in trainable}
    if len(set(by_name.values())) > 1:
        raise AssertionError(f"trainable parameters of one unit must have one dtype, but {unit!r} has {by_name}")
    return (trainable[0].orig_dtype, trainable[0].reduce_dtype) if trainable else (None, None)


def to_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or tensor.dtype == dtype else tensor.to(dtype)


def cast_forward_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Floating-point tensors in the arguments of a forward, nested ones too, in ``param_dtype``."""
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    with record_step("cast_forward_inputs"):
        return _cast(args, policy.param_dtype), _cast(kwargs, policy.param_dtype)


def cast_output_dtype(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Floating-point tensors that a forward returns, in ``output_dtype``."""
    if policy.output_dtype is None:
        return output
    with record_step("cast_forward_outputs"):
        return _cast(output, policy.output_dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return _apply_to_tensors(lambda t: to_dtype(t, dtype) if t.is_floating_point() else t, tree)


def all_gather_inputs(fsdp_params: list[Any]) -> list[list[torch.Tensor]]:
    """What each parameter contributes to the all-gather, 1D; all casts in one kernel, into one temporary."""
    to_cast = [p for p in fsdp_params if p.param_dtype is not None and not p.offload_to_cpu and p.extension is None]
    if not to_cast:
        return [p.all_gather_inputs for p in fsdp_params]
    data = [p.local_data for p in to_cast]
    sizes = [t.numel() for t in data]
    casts = torch.empty(sum(sizes), dtype=to_cast[0].param_dtype, device=to_cast[0].device).split(sizes)
    torch._foreach_copy_(casts, data)
    cast_of = dict(zip(to_cast, casts, strict=True))
    return [[cast_of[p]] if p in cast_of else p.all_gather_inputs for p in fsdp_params]


class Division(NamedTuple):
    """How a sum over the ranks becomes a mean, see [Note: dividing by the number of ranks]."""

    before: float | None  # divides the input of the reduce-scatter
    after: float | None  # divides the reduced gradients
    reduce_scatter_op: Any
    all_reduce_op: Any


def gradient_division(
    n_shards: int, n_replicas: int, dtype: torch.dtype, factor: float | None, force_sum: bool, has_premul_sum: bool
) -> Division:
    """Choose operations and factors (torch: `_fsdp_collectives._get_gradient_divide_factors`).

    Args:
        factor: the user's instead of the number of ranks (``set_gradient_divide_factor``).
        force_sum: never divide inside a collective (``set_force_sum_reduction_for_comms``).
        has_premul_sum: whether the backend can multiply before summing. gloo cannot.
    """
    may_overflow = dtype not in (torch.float32, torch.bfloat16)
    n_ranks = n_shards * n_replicas
    if not may_overflow and not force_sum:
        if factor is None:
            op = ReduceOp.AVG if n_ranks > 1 else ReduceOp.SUM
            return Division(None, None, op, op)
        if factor == n_shards:
            return Division(None, None, ReduceOp.AVG, ReduceOp.SUM)
        if has_premul_sum and n_shards > 1:
            return Division(None, None, dist._make_nccl_premul_sum(1 / factor), ReduceOp.SUM)
        return Division(factor, None, ReduceOp.SUM, ReduceOp.SUM)
    factor = float(n_ranks) if factor is None else factor
    if not may_overflow:
        return Division(None, factor, ReduceOp.SUM, ReduceOp.SUM)  # after the sum there is less to divide
    before = 1
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Division(before, factor / before, ReduceOp.SUM, ReduceOp.SUM)


def div_if_needed(tensor: torch.Tensor, factor: float | None) -> None:
    if factor is not None and factor != 1:
        tensor.div_(factor)
