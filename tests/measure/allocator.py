"""The allocator of a GPU that is not there."""

from __future__ import annotations

import pytest
import torch


class Allocator:
    """What torch.cuda answers after each alloc and free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.peak = self.workspace = 0
        for name, answer in {
            "memory_allocated": lambda device=None: self.now,
            "max_memory_allocated": lambda device=None: self.peak,
            "max_memory_reserved": lambda device=None: self.peak,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", self.now),
        }.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", self.clear, raising=False)

    def alloc(self, n_bytes: int) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)

    def matmul(self) -> None:
        if not self.workspace:
            self.workspace = 32 * 2**20
            self.alloc(self.workspace)

    def clear(self) -> None:
        self.alloc(-self.workspace)
        self.workspace = 0
