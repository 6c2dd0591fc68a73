"""Models small enough to train in milliseconds, with awkward sizes, and what the tests do with them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_sim.mini import fully_shard


class Matrix(nn.Module):
    """``y = x @ w``, the layer of the recorded programs."""

    def __init__(self, rows: int = 4, columns: int = 4) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(rows, columns) / rows**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w


class Toy(nn.Module):
    """The model of the recorded programs: the root owns ``embed`` and ``head``, each layer is a unit."""

    def __init__(self, n_layers: int = 3, sizes: tuple[int, ...] = ()) -> None:
        super().__init__()
        sizes = sizes or (4,) * (n_layers + 1)
        self.embed = Matrix(4, sizes[0])
        self.layers = nn.ModuleList(Matrix(a, b) for a, b in pairwise(sizes))
        self.head = Matrix(sizes[-1], 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, d_model: int, n_heads: int, d_hidden: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        # no bias: the gradient of a key's bias is zero up to rounding, and AdamW makes full steps out of rounding
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_hidden), nn.Linear(d_hidden, d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C)
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)  # (3, B, H, T, C/H)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)  # (B, T, C)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """17 tokens, width 14, hidden 15: few dimensions divide by the number of ranks. The input is integers."""

    def __init__(self, n_layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(17, 14)
        self.layers = nn.ModuleList(Block(14, 2, 15) for _ in range(n_layers))
        self.head = nn.Linear(14, 17, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def shard(model: nn.Module, shard_fn: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    """Each layer, then the root."""
    for layer in model.layers:  # type: ignore[union-attr]
        shard_fn(layer, **options)
    return shard_fn(model, **options)


def token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batches(n: int, size: int = 12) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(17, (size, 7), generator=generator) for _ in range(n)]


def my_part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


class Collectives(TorchDispatchMode):
    """Name and number of elements of every collective issued inside, in issue order."""

    def __init__(self) -> None:
        super().__init__()
        self.issued: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.issued.append((func._opname, args[0].numel()))
        return func(*args, **(kwargs or {}))

    @property
    def counts(self) -> tuple[int, int]:
        """(all-gathers, reduce-scatters)."""
        by_name = Counter(name for name, _ in self.issued)
        assert by_name.keys() <= {GATHER, REDUCE}, by_name
        return by_name[GATHER], by_name[REDUCE]


GATHER, REDUCE = "_allgather_base_", "_reduce_scatter_base_"  # single-tensor collectives, torch 2.11 to 2.13


def twin(model: nn.Module) -> nn.Module:
    """A copy to train in one process on the whole batch."""
    return copy.deepcopy(model)


def assert_same_params(sharded: nn.Module, plain: nn.Module, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for (name, a), (same_name, b) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert name == same_name
        _assert_close(name, a.full_tensor().detach(), b.detach(), rtol, atol)


def assert_same_grads(sharded: nn.Module, plain: nn.Module) -> None:
    for (name, a), (_, b) in zip(sharded.named_parameters(), plain.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            _assert_close(name, a.grad.full_tensor(), b.grad, rtol=1e-5, atol=1e-6)


def _assert_close(name: str, a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda message: f"{name}: {message}")
