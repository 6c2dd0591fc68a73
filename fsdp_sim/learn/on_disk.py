"""What exercises on checkpoints are given: a disk that is full at times, and a small training that depends on
everything a checkpoint has to hold."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard

FULL_BYTES = 512  # of a file, on a disk that is full
WIDTH = 16


class Disk(FileSystemWriter):
    """Where `torch.distributed.checkpoint` writes. The kernel refuses long files to this rank where it is full.

    Args:
        path: the folder of the checkpoint.
        full: whether this rank's writes fail, as on a disk without room.
    """

    def __init__(self, path: str | Path, full: bool = False) -> None:
        super().__init__(path)
        self.full = full

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        """Write this rank's file."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.full:
            sys.dont_write_bytecode = True  # else a compiled module that is cut short would be loaded ever after
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))
        try:
            return super().write_data(*args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Training:
    """A training on this rank: a sharded model with dropout, AdamW, and this rank's batches in order.

    Attributes:
        step: how many batches were read; the next one is ``batches[step]``.
    """

    def __init__(self, batches: Sequence[torch.Tensor]) -> None:
        torch.manual_seed(0)
        self.model: Any = network()
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.batches, self.step = batches, 0
        torch.manual_seed(1 + dist.get_rank())  # dropout is another on every rank

    def train(self, steps: int) -> list[float]:
        """Go on, and return the loss of each step on this rank."""
        losses = []
        for _ in range(steps):
            loss = self.model(self.batches[self.step]).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses


def network() -> nn.Sequential:
    """What `Training` trains."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh(), nn.Linear(WIDTH, 4))
