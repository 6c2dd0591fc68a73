"""Attention as a unit inside its block saves communication: true or false?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

LAYERS = 3


def attention_of_its_own():
    blocks = [nn.TransformerEncoderLayer(32, 2, 64, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Linear(32, 32), *blocks)
    for block in blocks:
        fully_shard(block.self_attn)
        fully_shard(block)
    fully_shard(model)
    with CommDebugMode() as counted:
        model(torch.randn(2, 4, 32)).sum().backward()
    gathers = sum(n for op, n in counted.get_comm_counts().items() if "all_gather" in str(op) or "allgather" in str(op))
    return gathers > 7, gathers  # with the blocks alone: 4 in forward, 3 in backward


def gathers(of_a_block: int) -> int:
    """All-gathers of one step in the program that torch issues, with so many units in each block."""
    units = [Unit("root", (Param("first", (4, 4)),), ("first", ...))]
    units += [Unit(f"layers.{i}", (Param("weight", (4, 4)),)) for i in range(LAYERS * of_a_block)]
    return sum(i.op is Op.ALL_GATHER for i in build(units, Plan(), world_size=2).ops)


EXERCISE = Exercise(
    title="Settle whether smaller units communicate less",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=10,
    contract='"With attention as a unit inside each block, FSDP gathers more often." On 2 ranks, take a model of a '
    "linear layer and three nn.TransformerEncoderLayer. With fully_shard make each layer's self_attn a unit, then "
    "each layer, then the root. Count the all-gathers of one step (forward and backward). Return (True or False, the "
    "number of all-gathers): True if they are more than with the layers alone.",
    reference=attention_of_its_own,
    why="Thirteen instead of seven: a unit more is a gather more in forward, one in backward, and a reduce-scatter. "
    "The bytes are the same, for each parameter is in one unit, and each gather pays a latency. What finer units buy "
    "is memory, since less is whole at once; for a block that is rarely worth twice the collectives.",
    hints=(
        "Does a unit inside a unit travel with it, or on its own?",
        "Count with torch.distributed.tensor.debug.CommDebugMode through forward and backward; the root stays whole.",
        "Six units beside the root: each is gathered in forward and in backward, the root in forward alone.",
    ),
    judge=Claim(
        statement="With attention as a unit inside each block, FSDP gathers more often",
        measured="all-gathers in one step",
        truth=lambda: gathers(of_a_block=2),
        holds=lambda found: found > gathers(of_a_block=1),
        counts="all_gather",
        beside=(("reduce_scatter", 2 * LAYERS + 1),),
        causes=(
            (
                gathers(of_a_block=1),
                "that is with the blocks alone, or the forward alone: units of attention, whole step",
            ),
            (4 * LAYERS + 2, "that is with reshard_after_forward=True for the root, which is not the default"),
        ),
    ),
    wrong=(
        mutant(
            {"fully_shard(block.self_attn)\nfully_shard(block)": "fully_shard(block)\nfully_shard(block.self_attn)"},
            "called fully_shard on a module whose parameters are in a unit already",
            name="outside in",
        ),
        mutant(
            {"fully_shard(block.self_attn)": ""},
            "that is with the blocks alone, or the forward alone",
            name="blocks alone",
        ),
        mutant(
            {"fully_shard(model)": "fully_shard(model, reshard_after_forward=True)"},
            "which is not the default",
            name="root freed",
        ),
        mutant(
            {"gathers > 7": "gathers < 7"},
            "the number is right, 13 all-gathers in one step, but",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda: (True, 13), "measure it"),),
    covers=("coverage 002.13", "pitfall 14", "misconception 2.10", "misconception 2.11"),
)
