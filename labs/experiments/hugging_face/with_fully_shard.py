"""FSDP2 on a Hugging Face model: what `fully_shard` needs to be told is the list of blocks.

Weights come from one rank. All ranks build the model on the meta device and cut it there; rank 0 alone makes the
weights (or reads pretrained ones) and sends every rank its part, so one copy of the model is in host memory, not one
per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labs.experiments.hugging_face import models
from labs.experiments.hugging_face.batches import IGNORED, Batch, Task

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class TrainingSetup:
    """What a training loop needs.

    Attributes:
        backward: called with the loss in place of ``loss.backward()``.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    backward: Callable[[torch.Tensor], None]


def build(task: Task) -> nn.Module:
    """The whole model of a task."""
    return models.build(task.family, seed=task.seed, pretrained=task.pretrained, checkpointing=task.checkpointing)


def start_single(task: Task, device: torch.device) -> TrainingSetup:
    """One process, nothing sharded."""
    model = build(task).to(device)
    return TrainingSetup(model, adamw(model), torch.Tensor.backward)


def start_fsdp2(task: Task, device: torch.device) -> TrainingSetup:
    """torch's `fully_shard`: each block a unit, the rest the root."""
    model = models.empty(task.family, pretrained=task.pretrained, checkpointing=task.checkpointing)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in models.blocks(model, task.family).values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device=device)
    weights_from_rank_0(model, task)
    return TrainingSetup(model, adamw(model), torch.Tensor.backward)


def weights_from_rank_0(model: nn.Module, task: Task) -> None:
    """Fill the shards of every rank. Buffers too: those that no checkpoint has hold, after ``to_empty``, anything."""
    whole = build(task) if dist.get_rank() == 0 else None
    state = whole.state_dict() if whole is not None else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    for name, buffer in model.named_buffers():
        if whole is not None:
            buffer.copy_(whole.get_buffer(name))
        dist.broadcast(buffer, src=0)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """torch's defaults. Made after sharding, so that it holds shards."""
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The sum over the targets of a rank's rows, padding ignored; a scalar.

    The sum, since ranks have unequally many targets: the mean of their means is not the mean over all targets.
    """
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs).logits
    return F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED, reduction="sum")


def train_step(started: TrainingSetup, batch: Batch, targets: int, ranks: int) -> torch.Tensor:
    """One step on a rank's rows.

    Args:
        targets: of the batches of all ranks. FSDP averages gradients over the ranks; ``ranks / targets`` makes of the
            average of sums the mean over all targets.

    Returns:
        the sum of this rank's losses, a scalar.
    """
    started.optimizer.zero_grad()
    loss = loss_of(started.model, batch)
    started.backward(loss * (ranks / targets))
    started.optimizer.step()
    return loss.detach()


Start = Callable[[Task, torch.device], TrainingSetup]


def fsdp_modules(model: nn.Module) -> dict[str, Any]:
    """The modules that have a unit of parameters, by name."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "unshard")}
