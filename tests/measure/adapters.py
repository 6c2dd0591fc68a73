"""LoRA as peft makes it, over linear layers as they are or as bitsandbytes stores them; for tests of memory."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Adapted(nn.Module):
    """peft's `lora.Linear` without dropout; of a quantised result it makes a copy, as `lora.bnb.Linear4bit`."""

    def __init__(self, base: nn.Module, shape: torch.Size, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A, self.lora_B = nn.Linear(shape[1], rank, bias=False), nn.Linear(rank, shape[0], bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base(x)
        if isinstance(self.base, Quantised):
            result = result.clone()
        return result + self.lora_B(self.lora_A(x)) * 2.0


class Quantised(nn.Module):
    """bitsandbytes' `Linear4bit`: four bits a number, packed into bf16, and an fp32 maximum for 64 of them."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.numel() // 4, 1, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("absmax", torch.empty(shape.numel() // 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _MatMul4Bit.apply(x, self.weight, self.shape)
        return made


class _MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ctx.save_for_backward(weight)
        ctx.shape = shape
        return F.linear(x, _dequantised(weight, shape))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] @ _dequantised(weight, ctx.shape), None, None


def _dequantised(weight: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return weight.new_empty(shape)


def with_adapters(model: Any, rank: int, *, targets: tuple[str, ...] = (), quantised: bool = False) -> Any:
    """Freeze a model and adapt the linear layers of its blocks, all or those of some names."""
    model.requires_grad_(False)
    for layer in model.layers:
        for name, linear in [(n, m) for n, m in layer.named_modules() if isinstance(m, nn.Linear)]:
            shape = linear.weight.shape
            base = Quantised(shape) if quantised else linear
            if not targets or name.rpartition(".")[2] in targets:
                base = Adapted(base, shape, rank)
            layer.set_submodule(name, base)
    return model
