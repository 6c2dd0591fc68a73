"""Two mistakes that Hugging Face models invite, made on purpose. Each function runs on the ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_sim.measure import live_bytes
from labs.data import local_batch
from labs.experiments.hugging_face import models
from labs.experiments.hugging_face.batches import Task, batches
from labs.experiments.hugging_face.measuring import units_of
from labs.experiments.hugging_face.with_accelerate import prepared
from labs.experiments.hugging_face.with_fully_shard import build, loss_of

CPU = torch.device("cpu")


@dataclass(frozen=True)
class TiedEmbedding:
    """What became of a tied embedding.

    Attributes:
        params: numbers in all units; more than the model has, where a parameter is in two.
        refused: what torch (2.13 and later) says at the first forward; None where it does not check.
    """

    params: int
    refused: str | None


def tied_in_two_units(through: str) -> TiedEmbedding:
    """T5's embedding as a unit of its own, by hand or as Accelerate does it by itself."""
    task = Task("t5", rows=2)
    model = WRAPPED[through](task)
    params = sum(units_of(model).values())
    batch = {name: local_batch(t, dist.get_rank(), dist.get_world_size()) for name, t in batches(task, 1)[0].items()}
    try:
        loss_of(model, batch)
    except ValueError as error:
        return TiedEmbedding(params, str(error))
    return TiedEmbedding(params, None)


def _by_hand(task: Task) -> nn.Module:
    model: Any = build(task)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in (*models.blocks(model, task.family).values(), model.shared):
        fully_shard(unit, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPED: dict[str, Callable[[Task], nn.Module]] = {
    "fully_shard": _by_hand,
    "accelerate": lambda task: prepared(build(task), task, CPU).model,
}


def loading(folder: str) -> dict[str, int]:
    """Bytes of whole weights that this rank holds before a pretrained T5 is sharded.

    ``every rank``: each calls ``from_pretrained``. ``rank 0``: it alone, as in `with_fully_shard.start_fsdp2`; the
    others have the model on the meta device.
    """
    pretrained = partial(models.build, "t5", pretrained=folder)
    from_rank_0 = pretrained if dist.get_rank() == 0 else partial(models.empty, "t5", pretrained=folder)
    return {"every rank": _held_bytes(pretrained()), "rank 0": _held_bytes(from_rank_0())}


def _held_bytes(model: nn.Module) -> int:
    with live_bytes(model) as meter:
        return meter.live_bytes
