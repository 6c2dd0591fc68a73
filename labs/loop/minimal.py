"""The training in pieces: with `labs.model.build` all that a notebook needs, and what the parity ladder varies.

The pieces do not care which `fully_shard` they are given: trained with the mini-FSDP the same GPT has the same losses.
`labs.train` is the same with everything a real run needs besides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.model.gpt import GPT


def shard(model: GPT, fully_shard: Callable[..., Any], **options: Any) -> GPT:
    """Shard in place: each block is a unit, then the root takes what is left (embeddings, last norm, head)."""
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def make_optimizer(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    """AdamW with torch's defaults. Make it after sharding: it is to hold the shards, not the whole parameters."""
    return torch.optim.AdamW(model.parameters(), lr=lr)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One step on this rank's rows, x and y of shape (rows, seq). Returns this rank's loss, a scalar tensor."""
    optimizer.zero_grad()
    loss = model(x, y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The mean over ranks, elementwise (ranks have equally many rows, so it is the loss of the whole batch)."""
    mean = values.clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean
