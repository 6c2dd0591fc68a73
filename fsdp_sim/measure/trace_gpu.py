"""What a GPU runs where the CPU runs something else.

Modules are traced with tensors that say they are on the CPU, for a torch without CUDA cannot differentiate any other.
Three functions choose a kernel by device, and what they keep for backward differs by as much as a third of a block:
attention (fused kernels also with dropout and masks), `rms_norm` (one kernel on CUDA, eight operations on CPU) and
`dropout` (a mask of bytes). This mode calls what CUDA's dispatcher would (aten/src/ATen/native/transformers/
cuda/sdp_utils.cpp, layer_norm.cpp, Dropout.cpp of torch 2.13).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
FLASH_MAX_HEAD_DIM = 256


class GpuKernels(TorchFunctionMode):
    """Inside, attention (unless it is composed), `rms_norm` and `dropout` are CUDA's kernels."""

    def __init__(self, *, fused_attention: bool = True) -> None:
        super().__init__()
        kept = () if fused_attention else (F.scaled_dot_product_attention,)
        self._replaced = {func: kernel for func, kernel in REPLACED.items() if func not in kept}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._replaced.get(func, func)(*args, **(kwargs or {}))


def refuse_recurrence(model: nn.Module, title: str) -> None:
    """A trace shows a recurrent layer step by step, or in one kernel of the CPU's; on a GPU it is cuDNN's.

    Raises:
        ValueError: the model has one.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            cell = "RNN" if isinstance(module, nn.RNN) else module.mode
            raise ValueError(
                f"{name or 'the model'} of {title} is nn.{type(module).__name__}, which a GPU computes in kernels of "
                f"cuDNN whose work is not known; trace the model without it, or with a loop over nn.{cell}Cell, which "
                f"runs step by step on a GPU too"
            )


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """FlashAttention for half precision without a mask, else memory-efficient attention."""
    d, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    if query.dim() != 4 or not query.is_floating_point() or query.dtype is torch.float64:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if half and attn_mask is None and d == value.shape[-1] and d <= FLASH_MAX_HEAD_DIM:
        pad = -d % 8  # the kernel takes multiples of 8
        if pad:
            scale = scale or 1 / math.sqrt(d)
            query, key, value = (F.pad(t, (0, pad)) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
        return out[..., :d] if pad else out
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
    )[0]


def _dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return aten.native_dropout(input, p, True)[0]


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    return rms_norm_kernel(input, list(normalized_shape), weight, eps)[0]


@torch.library.custom_op("fsdp_sim::rms_norm", mutates_args=())
def rms_norm_kernel(
    input: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA's fused RMS norm: the result, and one inverse deviation per row in fp32."""
    wide = input.float()
    over = tuple(range(-len(normalized_shape), 0))
    rstd = torch.rsqrt(wide.pow(2).mean(over, keepdim=True) + (torch.finfo(input.dtype).eps if eps is None else eps))
    out = (wide * rstd).to(input.dtype)
    return (out if weight is None else out * weight), rstd


@rms_norm_kernel.register_fake
def _(input: Any, normalized_shape: Any, weight: Any, eps: Any) -> Any:
    rows = input.shape[: input.dim() - len(normalized_shape)]
    return torch.empty_like(input), input.new_empty((*rows, *(1 for _ in normalized_shape)), dtype=torch.float32)


@torch.library.custom_op("fsdp_sim::rms_norm_backward", mutates_args=())
def rms_norm_backward_kernel(
    grad: torch.Tensor, input: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor | None, normalized_dims: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the input and of the weight (empty without one)."""
    normed = input.float() * rstd
    scaled = grad.float() * (1.0 if weight is None else weight.float())
    over = tuple(range(-normalized_dims, 0))
    grad_input = rstd * (scaled - normed * (scaled * normed).mean(over, keepdim=True))
    if weight is None:
        return grad_input.to(input.dtype), input.new_empty(0)
    grad_weight = (grad.float() * normed).sum(tuple(range(grad.dim() - normalized_dims)))
    return grad_input.to(input.dtype), grad_weight.to(weight.dtype)


@rms_norm_backward_kernel.register_fake
def _(grad: Any, input: Any, rstd: Any, weight: Any, normalized_dims: Any) -> Any:
    return torch.empty_like(input), torch.empty_like(weight) if weight is not None else input.new_empty(0)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    input, normalized_shape, weight, _ = inputs
    ctx.save_for_backward(input, output[1], weight)
    ctx.normalized_dims = len(normalized_shape)


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
    input, rstd, weight = ctx.saved_tensors
    grad_input, grad_weight = rms_norm_backward_kernel(grad, input, rstd, weight, ctx.normalized_dims)
    return grad_input, None, None if weight is None else grad_weight, None


rms_norm_kernel.register_autograd(_differentiate, setup_context=_save)


REPLACED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    torch.dropout: _dropout,
}
"""Functions whose kernel depends on the device. A mode is off while it handles a call."""
