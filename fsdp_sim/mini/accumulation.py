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

import torch

from fsdp_sim.mini import versions
from fsdp_sim.mini.param import FSDPParam
from fsdp_sim.mini.streams import Streams


def add_to_accumulated_grad(fsdp_param: FSDPParam) -> None:
    """Add the gradient autograd has just written to the one kept in ``reduce_dtype``, if there is one."""
    if fsdp_param.unsharded_accumulated_grad is not None and fsdp_param.unsharded_param.grad is not None:
        fsdp_param.unsharded_accumulated_grad += fsdp_param.unsharded_param.grad
        fsdp_param.unsharded_param.grad = None


def leave_wider_grads(fsdp_params: list[FSDPParam], reduce_grads: bool) -> None:
    """Before backward, from torch 2.15 on: let autograd leave gradients in the dtype it computes them in.

    The copy-in casts them, or they are added to wider ones. A gradient that begins to accumulate is cast at once.
    """
    for p in wider_grads(fsdp_params):
        if p.unsharded_param.grad is not None or reduce_grads:
            p.unsharded_param.grad_dtype = None


def cast_wider_grads(fsdp_params: list[FSDPParam]) -> None:
    """After backward, from torch 2.15 on: gradients that stay are in the reduce dtype, and so are those that follow."""
    for p in wider_grads(fsdp_params):
        param, grad = p.unsharded_param, p.unsharded_param.grad
        if grad is not None and grad.dtype != p.reduce_dtype:
            param.grad = grad.to(p.reduce_dtype)
        param.grad_dtype = p.reduce_dtype


def wider_grads(fsdp_params: list[FSDPParam]) -> list[FSDPParam]:
    """Parameters whose gradients are computed in a smaller dtype than they are reduced in, and which autograd keeps."""
    if not versions.GRADS_KEEP_ORIGINAL_DTYPE:
        return []
    return [
        p
        for p in fsdp_params
        if p.was_gathered
        and p.unsharded_param.requires_grad
        and p.reduce_dtype is not None
        and p.reduce_dtype.is_floating_point
        and (p.param_dtype or p.orig_dtype).is_floating_point
        and p.reduce_dtype.itemsize > (p.param_dtype or p.orig_dtype).itemsize
    ]


def keep_in_reduce_dtype(fsdp_param: FSDPParam) -> None:
    """Of a gradient that is not reduced yet keep a copy in ``reduce_dtype`` instead (before torch 2.15)."""
    if versions.GRADS_KEEP_ORIGINAL_DTYPE:
        return
    grad = fsdp_param.unsharded_param.grad if fsdp_param.was_gathered else None
    if fsdp_param.reduce_dtype is not None and grad is not None and grad.dtype != fsdp_param.reduce_dtype:
        fsdp_param.unsharded_param.grad = None
        fsdp_param.unsharded_accumulated_grad = grad.to(fsdp_param.reduce_dtype)


def take_unsharded_grads(
    fsdp_params: list[FSDPParam], partial_params: list[FSDPParam], unused_too: bool
) -> tuple[list[FSDPParam], list[torch.Tensor]]:
    """The gradients of whole parameters, and whose they are. The list then holds the only references to them.

    A trainable parameter without a gradient is left out, or gets one of zeros where it is among ``partial_params``,
    of which earlier micro-batches left some to all-reduce (from torch 2.15 on), or ``unused_too`` asks for all.
    """
    zeros_for = fsdp_params if unused_too else partial_params if versions.GRADS_KEEP_ORIGINAL_DTYPE else []
    params, grads = [], []
    for p in fsdp_params:
        grad = p.take_unsharded_grad()
        if grad is None and p in zeros_for and p.sharded_param.requires_grad and p.was_gathered:
            dtype = p.unsharded_param.grad_dtype if versions.GRADS_KEEP_ORIGINAL_DTYPE else None
            grad = torch.zeros_like(p.unsharded_param, dtype=dtype)
        if grad is not None:
            params.append(p)
            grads.append(grad)
    return params, grads


@torch.no_grad()
def lay_out_partial(
    partial: torch.Tensor | None, before: list[FSDPParam], params: list[FSDPParam], ctx: Streams
) -> torch.Tensor | None:
    """What earlier micro-batches scattered of ``before``, and did not all-reduce, in the order of ``params``.

    A parameter may get its first gradient in a later micro-batch. Before torch 2.15 that was not looked after.
    Stream: reduce-scatter.
    """
    if partial is None or not versions.GRADS_KEEP_ORIGINAL_DTYPE:
        return partial
    ctx.reduce_scatter_stream.wait_stream(ctx.current_stream())
    if before == params:
        return partial
    sizes, sizes_before = ([p.padded_sharded_param_size.numel() for p in some] for some in (params, before))
    with ctx.device_handle.stream(ctx.reduce_scatter_stream):
        laid_out = partial.new_zeros(sum(sizes))
        rows_before = dict(zip(before, partial.split(sizes_before), strict=True))
        for p, rows in zip(params, laid_out.split(sizes), strict=True):
            if p in rows_before:
                rows.copy_(rows_before[p])
    return laid_out
