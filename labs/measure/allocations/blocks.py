"""What a recording of memory consists of: blocks, each alive from one moment to another, and who asked for them.

The same for CPU ranks (`labs.measure.allocations.counted`) and for GPUs (`labs.measure.allocations.on_gpu`). So one set
of rules says what a block is for (`labs.measure.allocations.purpose`), and most of what matters on a GPU is tested
where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages

from fsdp_sim.timeline import Memory


class Frame(NamedTuple):
    """One call of a stack, as CUDA's snapshots have it. Of an operator: no file, and its name."""

    filename: str
    line: int
    name: str


class AllocationMoment(NamedTuple):
    """When memory was allocated or freed, and from where.

    Attributes:
        number: counts moments in the order in which they came; 0 is before all of them.
        at_s: of any clock, the same for all moments of a recording.
        frames: the calls that led there, innermost first. Empty on a thread without Python, as autograd's for a GPU.
    """

    number: int
    at_s: float
    frames: tuple[Frame, ...] = ()


@dataclass(frozen=True)
class Block:
    """Memory from its allocation to its release.

    Attributes:
        died: None where it is alive at the end.
        known: what it is for, if it was there before the recording; None if it was allocated in it.
    """

    bytes: int
    born: AllocationMoment
    died: AllocationMoment | None = None
    known: Memory | None = None


def states_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, sharded: bool
) -> list[tuple[torch.UntypedStorage, Memory]]:
    """What is there before a step and is known: parameters, gradients of the step before, and optimizer state.

    Args:
        sharded: whether a rank keeps its part of each gradient; with DDP it keeps the whole.
    """
    grads = Memory.RS_OUTPUT if sharded else Memory.UNSHARDED_GRAD
    tensors: list[tuple[torch.Tensor, Memory]] = []
    for param in model.parameters():
        tensors.append((param, Memory.SHARDED))
        if param.grad is not None:
            tensors.append((param.grad, grads))
    for state in optimizer.state.values():
        tensors += [(value, Memory.OPTIMIZER) for value in state.values() if isinstance(value, torch.Tensor)]
    return [(storage, category) for tensor, category in tensors for storage in get_untyped_storages(tensor)]
