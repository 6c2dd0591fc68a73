"""Random tokens to train on: what a step takes, in memory and in time, does not depend on the text."""

from __future__ import annotations

import torch

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.data.loader import Batch
from labs.model import ModelConfig


def random_batch(config: TrainConfig, model_config: ModelConfig, place: RankPlace) -> tuple[Batch, int]:
    """This rank's rows of random tokens, and their number of micro-batches."""
    rows = config.global_batch // place.world_size
    tokens = torch.randint(0, model_config.vocab_size, (rows, config.plan.seq_len + 1))
    batch = Batch(tokens[:, :-1].clone(), tokens[:, 1:].clone(), config.global_batch * config.plan.seq_len, 0)
    return batch, rows // (config.micro_batch or rows)
