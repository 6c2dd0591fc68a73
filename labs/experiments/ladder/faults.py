"""Mistakes to seed into a rung of the parity ladder, so that one sees the ladder find them.

Each is one that people make, made with the means of a training script. A fault acts at one of three moments: when a
rank builds the model, when it takes its rows of the batch, or after the rung is built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.mini.param import local_tensor
from labs.experiments.ladder.rungs import RUNGS, Replicas

OTHER_SEED = 1000
DTENSORS = ("torch-fsdp2", "mini-fsdp", "torch-hsdp", "mini-hsdp", "torch-3", "mini-3", "torch-bf16", "mini-bf16")


def not_averaged(rung: Replicas) -> None:
    rung.model.layers[0].set_gradient_divide_factor(1.0)  # type: ignore[union-attr, index]


def kept_whole(rung: Replicas) -> None:
    rung.model.layers[0].set_reshard_after_forward(False)  # type: ignore[union-attr, index]


def stale_shard(rung: Replicas) -> None:
    weight = rung.model.layers[1].mlp.fc.weight  # type: ignore[union-attr, index]
    kept: list[torch.Tensor] = []

    def before(*_: Any) -> None:
        kept[:] = [local_tensor(weight.detach()).clone()]

    def after(*_: Any) -> None:
        with torch.no_grad():
            local_tensor(weight.detach()).copy_(kept[0])

    if dist.get_rank() == dist.get_world_size() - 1:
        rung.optimizer.register_step_pre_hook(before)
        rung.optimizer.register_step_post_hook(after)


@dataclass(frozen=True)
class Fault:
    """A mistake.

    Attributes:
        help: what is done wrong.
        rungs: to which it can be done.
        spoil: called on every rank with the rung.
        wrong_seed: the last rank builds other weights.
        same_rows: every rank trains on the first rank's rows.
        min_ranks: fewer would not notice.
    """

    help: str
    rungs: tuple[str, ...]
    spoil: Callable[[Replicas], None] | None = None
    wrong_seed: bool = False
    same_rows: bool = False
    min_ranks: int = 2


ALL = tuple(name for name in RUNGS if name != "one-process")
FAULTS = {
    "not-averaged": Fault("gradients of layers.0 are summed over the ranks", ("mini-fsdp", "mini-hsdp"), not_averaged),
    "wrong-seed": Fault("the last rank starts from other weights", ALL, wrong_seed=True),
    "same-rows": Fault("every rank trains on the same rows", ALL, same_rows=True),
    "stale-shard": Fault("the last rank's shard of layers.1.mlp.fc.weight is not stepped", DTENSORS, stale_shard),
    "kept-whole": Fault("layers.0 is not resharded after its forward", DTENSORS, kept_whole, min_ranks=1),
}


def check_fault(name: str, rung: str, world_size: int) -> None:
    """Raise ValueError, naming what would do, unless the fault can be done to the rung on so many ranks."""
    if name not in FAULTS:
        raise ValueError(f"there is no fault {name!r}; there are {', '.join(FAULTS)}")
    fault = FAULTS[name]
    if rung not in fault.rungs:
        raise ValueError(f"{name} cannot be done to {rung!r}; it can to {', '.join(fault.rungs)}")
    if world_size < fault.min_ranks:
        raise ValueError(f"{name} takes {fault.min_ranks} ranks or more to be wrong, not {world_size}")
