"""The same through Lightning Fabric: `ModelParallelStrategy` calls a function that shards the model.

Fabric's ``FSDPStrategy`` is FSDP1, and refuses CPUs; `refusal` has its words. Under `ModelParallelStrategy` one calls
`fully_shard` oneself: Fabric makes the mesh, and hides the device and the process group.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from labs.experiments.hugging_face import models
from labs.experiments.hugging_face.batches import Task
from labs.experiments.hugging_face.packages import needs
from labs.experiments.hugging_face.with_accelerate import ranks_in_environment
from labs.experiments.hugging_face.with_fully_shard import TrainingSetup, adamw, build


def start_fabric(task: Task, device: torch.device) -> TrainingSetup:
    """FSDP2 through `ModelParallelStrategy`."""

    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for block in models.blocks(model, task.family).values():
            fully_shard(block, mesh=mesh["data_parallel"])
        fully_shard(model, mesh=mesh["data_parallel"])
        return model

    ranks = dist.get_world_size()
    strategies = needs("lightning_fabric.strategies")
    fabric = fabric_on(device, strategies.ModelParallelStrategy(shard, ranks, tensor_parallel_size=1))
    model = fabric.setup_module(build(task))
    return TrainingSetup(model, fabric.setup_optimizers(adamw(model)), fabric.backward)


def fabric_on(device: torch.device, strategy: Any) -> Any:
    """A `Fabric` of all ranks."""
    ranks_in_environment()
    fabric = needs("lightning_fabric").Fabric(accelerator=device.type, devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def refusal(device: torch.device) -> str | None:
    """What ``FSDPStrategy``, which is FSDP1, says to this device; None where it takes it."""
    try:
        fabric_on(device, needs("lightning_fabric.strategies").FSDPStrategy())
    except ValueError as error:
        return str(error)
    return None
