"""The same through Accelerate: `prepare` shards the model, and puts the optimizer's parameters in place of the old.

On CPU ranks Accelerate (1.15) takes its FSDP plugin and does not use it: only GPUs and their like make it choose FSDP,
and it trains with DDP, without a word (`start_as_it_is`). `start_accelerate` sets the two fields that it sets on GPUs;
what follows is Accelerate's own code.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labs.experiments.hugging_face import models
from labs.experiments.hugging_face.batches import Task
from labs.experiments.hugging_face.packages import needs
from labs.experiments.hugging_face.with_fully_shard import TrainingSetup, adamw, build


def start_accelerate(task: Task, device: torch.device) -> TrainingSetup:
    """FSDP2 through Accelerate's plugin."""
    model = build(task)
    share_embedding(model)
    return prepared(model, task, device)


def prepared(model: nn.Module, task: Task, device: torch.device) -> TrainingSetup:
    """The model as it is given to ``Accelerator.prepare``."""
    accelerator = accelerate_on(task, device)
    if device.type == "cpu":
        use_fsdp_on_cpu(accelerator, task)
    model, optimizer = accelerator.prepare(model, adamw(model))
    return TrainingSetup(model, optimizer, accelerator.backward)


def use_fsdp_on_cpu(accelerator: Any, task: Task) -> None:
    """What `AcceleratorState` does by itself on GPUs."""
    accelerator.state.distributed_type = needs("accelerate.utils").DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin(task)


def start_as_it_is(task: Task, device: torch.device) -> TrainingSetup:
    """The same call, and what Accelerate makes of it on this device."""
    model = build(task)
    accelerator = accelerate_on(task, device)
    model, optimizer = accelerator.prepare(model, adamw(model))
    return TrainingSetup(model, optimizer, accelerator.backward)


def accelerate_on(task: Task, device: torch.device) -> Any:
    """An `Accelerator` that was asked for FSDP2."""
    ranks_in_environment()
    needs("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)  # one process, several trainings
    return needs("accelerate").Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin(task))


def plugin(task: Task) -> Any:
    """Units by the name of the blocks' class. ``reshard_after_forward`` has to be said: it takes no None."""
    return needs("accelerate").FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[models.FAMILIES[task.family].block],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
    )


def share_embedding(model: Any) -> None:
    """Make the places of a tied embedding one module.

    Accelerate gives the input embedding and the head a unit of their own. T5 of transformers 5 has two more modules
    with that weight, which would end up in the root: `pitfalls.tied_in_two_units` shows what comes of it.
    """
    shared = model.get_input_embeddings()
    for part in (getattr(model, "encoder", None), getattr(model, "decoder", None)):
        if part is not None and getattr(part, "embed_tokens", None) is not None:
            part.embed_tokens = shared


def ranks_in_environment() -> None:
    """What torchrun sets, for ranks that it did not start; the process group is there already."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    known["OMP_NUM_THREADS"] = torch.get_num_threads()  # else Accelerate sets another number, and warns of it
    for name, value in {**known, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}.items():
        os.environ.setdefault(name, str(value))
