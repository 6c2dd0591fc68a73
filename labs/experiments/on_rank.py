"""What the labs train on ranks that `fsdp_sim.ranks` has started: random tokens, wrapped as the trainer does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.data.random_batch import random_batch
from labs.loop.optimizer import make_optimizer
from labs.loop.step import StepOutcome, train_step
from labs.wrapping import Wrapped, wrap


@dataclass(frozen=True)
class RankTraining:
    """A training on this rank.

    Attributes:
        step: trains one step, given its number.
    """

    wrapped: Wrapped
    optimizer: torch.optim.Optimizer
    step: Callable[[int], StepOutcome]


def here() -> RankPlace:
    """This rank's place: all ranks are on one machine."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return RankPlace(rank, ranks, rank, ranks, torchrun=True)


def on_rank(
    config: TrainConfig, make: Callable[[Wrapped, TrainConfig], torch.optim.Optimizer] = make_optimizer
) -> RankTraining:
    """A training, not yet begun: on CPU cores, or with ``device=cuda`` on the rank's own GPU.

    Args:
        make: makes the optimizer.
    """
    place = here()
    device = torch.device("cuda", place.local_rank) if config.device == "cuda" else torch.device("cpu")
    wrapped = wrap(config, config.model_config, place, device)
    optimizer = make(wrapped, config)
    batch, n_micro_batches = random_batch(config, config.model_config, place)
    batch = batch.to(device)

    def step(number: int) -> StepOutcome:
        return train_step(wrapped, optimizer, batch, number, config, n_micro_batches=n_micro_batches)

    return RankTraining(wrapped, optimizer, step)
