"""Backward needs no communication: true or false?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import Op

BLOCKS = 4


def silent_backward():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    for block in list(model)[1:]:  # 4 units; the first Linear is left to the root
        fully_shard(block)
    fully_shard(model)
    loss = model(torch.randn(2, 64)).sum()
    with CommDebugMode() as counted:
        loss.backward()
    reductions = sum(n for op, n in counted.get_comm_counts().items() if "reduce_scatter" in str(op))
    return reductions == 0, reductions


def in_the_program() -> int:
    """Reduce-scatters of one step, in the program that the simulator builds."""
    return sum(instruction.op is Op.REDUCE_SCATTER for instruction in toy_program(BLOCKS, world_size=2).ops)


EXERCISE = Exercise(
    title="Settle whether backward communicates",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=5,
    minutes=10,
    contract='"Each rank computes gradients only for its own shard, so backward needs no communication." On 2 ranks, '
    "run one step (forward and backward) of a small model of 4 units and a root with torch's fully_shard, and count "
    "the reduce-scatters of its backward. Return (True or False, the number of reduce-scatters).",
    reference=silent_backward,
    why="Five, one for each unit and the root. A rank computes whole gradients, of all parameters, from its own rows "
    "of the batch; what it may keep of them is its rows of their mean, and that takes everybody's. Backward also "
    "gathers the four blocks' parameters again: it communicates twice as much as forward.",
    hints=(
        "Two ranks have seen different rows of the batch. What does a rank need to know to step its shard rightly?",
        "Count what backward issues with torch.distributed.tensor.debug.CommDebugMode.",
        "Shard 4 layers and then the model; put only loss.backward() in the with; add up what has reduce_scatter in "
        "its name.",
    ),
    judge=Claim(
        statement="Each rank computes gradients only for its own shard, so backward needs no communication",
        measured="reduce-scatters in backward",
        truth=in_the_program,
        holds=lambda reductions: reductions == 0,
        counts="reduce_scatter",
        beside=(("all_gather", 2 * BLOCKS + 1),),
        causes=(
            (4, "the root is a unit too, and reduces its gradients last"),
            (9, "the other four are all-gathers, of parameters; count the reduce-scatters"),
            (0, "count in backward: forward reduces nothing"),
        ),
    ),
    wrong=(
        mutant(
            {"reductions == 0, reductions": "reductions == 0, reductions - 1"},
            "the root is a unit too",
            name="root forgotten",
        ),
        mutant({' if "reduce_scatter" in str(op)': ""}, "the other four are all-gathers", name="gathers too"),
        mutant({"reductions == 0, reductions": "True, 0"}, "count in backward", name="nothing seen"),
        mutant(
            {"reductions == 0": "reductions > 0"},
            "the number is right, 5 reduce-scatters in backward, but",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda: (False, 5), "measure it"),),
    covers=("misconception 3", "coverage 000.13", "coverage 000.7", "coverage 003.12"),
)
