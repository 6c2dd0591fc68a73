"""fully_shard begins from rank 0's weights: true or false?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, ROWS, COLUMNS = 2, 256, 256


def whose_first_weights(weight):
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data.copy_(weight)  # every rank has drawn other numbers
    fully_shard(layer)
    whole = layer.state_dict()["weight"].full_tensor()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kept = torch.equal(whole.chunk(ranks)[rank], weight.chunk(ranks)[rank])  # its own rows, as they were
    return {"broadcasts": not kept, "whole": whole}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(ROWS, COLUMNS, generator=draw),) for _ in range(RANKS)]


def mosaic(inputs: Inputs) -> list[dict[str, Any]]:
    whole = torch.cat([weight.chunk(RANKS)[rank] for rank, (weight,) in enumerate(inputs)])
    return [{"broadcasts": False, "whole": whole}] * RANKS


def of_rank_0(inputs: Inputs) -> list[dict[str, Any]]:
    return [{"broadcasts": True, "whole": inputs[0][0]}] * RANKS


def as_ddp(weight):
    dist.broadcast(weight, src=0)
    return {"broadcasts": True, "whole": weight}


EXERCISE = Exercise(
    title="Settle whose weights training begins with",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=5,
    minutes=15,
    contract='"fully_shard broadcasts rank 0\'s weights when it is called, as DDP does." Every rank is given a weight '
    "of its own, as if each had been seeded differently. On 2 ranks, put it into an nn.Linear without bias, shard that "
    "with torch's fully_shard, and look at the whole weight afterwards. Return a dict: 'broadcasts', True or False, "
    "and 'whole', the whole weight as a plain tensor.",
    reference=whose_first_weights,
    why="A mosaic: first rows of rank 0's weight, then rows of rank 1's, and so on. fully_shard keeps of each "
    "parameter the rows that are this rank's, and communicates nothing. The model still trains, from weights that "
    "nobody has drawn, and no run on another number of ranks will ever agree with it. With HSDP the replicas differ "
    "from each other for good. Seed all ranks alike, or load on rank 0 with broadcast_from_rank0. (FSDP1 broadcasts if "
    "sync_module_states=True; that is not its default.)",
    hints=(
        "Does fully_shard communicate at all? What would it have to send for all ranks to begin alike?",
        "The weight is a DTensor now, in the state dict too; its full_tensor() gathers all rows. Whose are they?",
        "Linear, copy the weight into it, fully_shard, full_tensor() of state_dict()['weight']; which rows are yours?",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=mosaic,
        causes=(
            (of_rank_0, "this is rank 0's weight, which DDP would broadcast; look at what fully_shard leaves"),
            (
                lambda inputs: [{"broadcasts": False, "whole": weight} for (weight,) in inputs],
                "this is the rank's own weight before it was sharded; the whole is spread over the ranks now",
            ),
            (
                lambda inputs: [found | {"broadcasts": True} for found in mosaic(inputs)],
                "the whole is right: look at whose rows are in it",
            ),
        ),
    ),
    wrong=(
        Wrong(as_ddp, "which DDP would broadcast"),
        mutant(
            {'layer.state_dict()["weight"].full_tensor()': "weight"}, "before it was sharded", name="before sharding"
        ),
        mutant({"full_tensor()": "to_local()", "not kept": "False"}, "its shape should be", name="own rows"),
        mutant({"not kept": "True"}, "look at whose rows are in it", name="other conclusion"),
    ),
    shortcuts=(Wrong(lambda weight: {"broadcasts": False, "whole": torch.zeros(ROWS, COLUMNS)}, "expected"),),
    covers=("misconception 26", "pitfall 19"),
)
