"""What a model and its optimizer hold before a step: the blocks of a recording whose purpose is known.

Blocks are the same for CPU ranks (`labs.measure.allocations.counted`), for GPUs (`labs.measure.allocations.on_gpu`) and
for ``fsdp-sim diagnose --memory`` (`fsdp_sim.timeline.snapshot`). So one set of rules says what a block is for
(`fsdp_sim.timeline.snapshot.purpose`), and most of what matters on a GPU is tested where there is none.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed._tools.common_utils import get_untyped_storages

from fsdp_sim.timeline import Memory


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
