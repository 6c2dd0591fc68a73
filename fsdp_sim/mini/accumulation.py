"""Gradient accumulation: what is communicated for each micro-batch, and what waits for the last one.

[Note: where gradients accumulate]

    reduce every micro-batch (default)      in the sharded ``.grad``: 1/W of the bytes, a reduce-scatter each time
    set_requires_gradient_sync(False)       in whole gradients on every rank: no communication, W times the bytes.
                                            In ``reduce_dtype`` if that differs, so that many small ones are not lost
    set_requires_all_reduce(False)          hybrid sharding: reduced within the shard group, the partial sums wait for
                                            the one all-reduce

``set_reshard_after_backward(False)`` spares the next micro-batch its all-gathers, ``set_is_last_backward(False)`` the
wait for the last reduce-scatter at the end of backward: the next micro-batch's forward runs meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fsdp_sim.mini import recording

if TYPE_CHECKING:
    from fsdp_sim.mini.param import FSDPParam
    from fsdp_sim.mini.state import FSDPState


def add_to_accumulated_grad(fsdp_param: FSDPParam) -> None:
    """Add the gradient autograd has just written to the one kept in ``reduce_dtype``, if there is one."""
    if fsdp_param.unsharded_accumulated_grad is not None and fsdp_param.unsharded_param.grad is not None:
        fsdp_param.unsharded_accumulated_grad += fsdp_param.unsharded_param.grad
        fsdp_param.unsharded_param.grad = None


def keep_in_reduce_dtype(fsdp_param: FSDPParam, unit: str) -> None:
    """Of a gradient that is not reduced yet keep a copy in ``reduce_dtype`` instead."""
    grad = fsdp_param.unsharded_param.grad if fsdp_param.was_gathered else None
    if fsdp_param.reduce_dtype is not None and grad is not None and grad.dtype != fsdp_param.reduce_dtype:
        fsdp_param.unsharded_param.grad = None
        fsdp_param.unsharded_accumulated_grad = grad.to(fsdp_param.reduce_dtype)
        recording.grad_kept(fsdp_param, fsdp_param.unsharded_accumulated_grad, unit)


def take_unsharded_grads(
    fsdp_params: list[FSDPParam], zeros_for_unused: bool
) -> tuple[list[FSDPParam], list[torch.Tensor]]:
    """The gradients of whole parameters, and whose they are. The list then holds the only references to them.

    Args:
        zeros_for_unused: give trainable parameters without a gradient one of zeros, instead of leaving them out.
    """
    params, grads = [], []
    for p in fsdp_params:
        grad = p.take_unsharded_grad()
        if grad is None and zeros_for_unused and p.sharded_param.requires_grad and p.was_gathered:
            grad = torch.zeros_like(p.unsharded_param)
        if grad is not None:
            params.append(p)
            grads.append(grad)
    return params, grads


class AccumulationMethods:
    """The methods of `FSDPModule` that say what is communicated for the next micro-batch."""

    if TYPE_CHECKING:

        def _get_fsdp_state(self) -> FSDPState: ...
        def _set_on_groups(self, recurse: bool, **values: Any) -> None: ...

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False accumulates whole gradients on each rank, without communication."""
        self._set_on_groups(recurse, reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces the reduce-scattered gradients (hybrid sharding). False keeps partial sums."""
        self._set_on_groups(recurse, all_reduce_grads=requires_all_reduce)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the unsharded parameters. False spares the next micro-batch its all-gathers."""
        self._set_on_groups(recurse, reshard_after_backward=reshard_after_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends by waiting for all reductions. Pipelines set it for the last micro-batch.

        Until then read no gradient: a reduction may be under way.
        """
        self._get_fsdp_state()._state_ctx.is_last_backward = is_last_backward
