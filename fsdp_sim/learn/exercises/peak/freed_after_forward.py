"""Full sharding frees parameters only after backward: true or false?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import Op

BLOCKS = 5


def freed_after_forward():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    for block in list(model)[1:]:  # 5 units; the first layer is left to the root
        fully_shard(block)
    fully_shard(model)
    with CommDebugMode() as counted:
        y = model(torch.randn(2, 64))
        freed = [isinstance(block.weight, DTensor) for block in model]  # in order: the root's, then the blocks'
        y.sum().backward()
    gathers = sum(n for op, n in counted.get_comm_counts().items() if "all_gather" in str(op) or "allgather" in str(op))
    return freed.count(False) == 1, gathers


def in_the_program() -> int:
    """All-gathers of one step with the default, in the program that the simulator builds."""
    return sum(instruction.op is Op.ALL_GATHER for instruction in toy_program(BLOCKS, world_size=2).ops)


EXERCISE = Exercise(
    title="Settle when full sharding frees parameters",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=10,
    contract='"With torch\'s defaults one unit alone is whole when backward begins." On 2 ranks, shard a model of 5 '
    "units and a root with torch's fully_shard and its defaults, run one forward and look at the weights (a DTensor "
    "is a shard again), then one backward. Return (True or False, the number of all-gathers in the whole step).",
    reference=freed_after_forward,
    why="After forward the weights of all 5 units are DTensors again, and backward gathers each of them a second "
    "time: 6 and 5 all-gathers, 11. Only the root stays whole, for its backward comes first. What frees after "
    "backward only is reshard_after_forward=False (FSDP1's SHARD_GRAD_OP), and what it costs is the whole model at "
    "the end of forward.",
    hints=(
        "If nothing were freed after forward, what would backward have to gather?",
        "Between forward and backward look at type(block.weight); count over the whole step.",
        "Forward gathers 5 units and the root. Backward gathers what was freed: is the root among it?",
    ),
    judge=Claim(
        statement="With torch's defaults one unit alone is whole when backward begins",
        measured="all-gathers in one step",
        truth=in_the_program,
        holds=lambda gathers: gathers == 2 * BLOCKS + 1,
        counts="all_gather",
        beside=(("reduce_scatter", BLOCKS + 1),),
        causes=(
            (2 * BLOCKS, "the root is a unit too, of what the 5 leave to it: give the model one layer more"),
            (BLOCKS + 1, "so it is if backward gathers nothing; count the whole step, with the defaults"),
            (2 * BLOCKS + 2, "with the defaults the root stays whole after forward, for its backward comes first"),
        ),
    ),
    wrong=(
        mutant(
            {
                "fully_shard(block)": "fully_shard(block, reshard_after_forward=False)",
                "fully_shard(model)": "fully_shard(model, reshard_after_forward=False)",
            },
            "so it is if backward gathers nothing",
            name="never freed",
        ),
        mutant(
            {"fully_shard(model)": "fully_shard(model, reshard_after_forward=True)"},
            "with the defaults the root stays whole",
            name="root too",
        ),
        mutant({"y.sum().backward()": ""}, "count the whole step", name="forward alone"),
        mutant(
            {"freed.count(False) == 1": "all(freed)"},
            "the number is right, 11 all-gathers in one step, but",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda: (True, 11), "measure it"),),
    covers=("misconception 5",),
)
