"""The owner of a layer broadcasts its weights: true or false?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import Op, Phase

LAYERS = 4


def owner_or_everyone():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    for layer in list(model)[1:]:  # 4 units; the first Linear is left to the root
        fully_shard(layer)
    fully_shard(model)
    with CommDebugMode() as counted:
        model(torch.randn(2, 64))
    gathers = sum(n for op, n in counted.get_comm_counts().items() if "all_gather" in str(op) or "allgather" in str(op))
    return gathers == 0, gathers


def in_forward() -> int:
    """All-gathers of one forward, in the program that the simulator builds."""
    ops = toy_program(LAYERS, world_size=2).ops
    return sum(i.op is Op.ALL_GATHER and i.phase is Phase.FORWARD for i in ops)


EXERCISE = Exercise(
    title="Settle whether the owner of a layer broadcasts it",
    kind=ExerciseKind.CLAIM,
    difficulty=1,
    importance=4,
    minutes=15,
    contract='"In forward, the rank that owns a layer broadcasts its weights, so FSDP needs no all-gather." On 2 '
    "ranks, shard a small model of 4 units, and a root that has a layer of its own, with torch's fully_shard. Run one "
    "forward (no backward) and count its all-gathers. Return (True or False, the number of all-gathers).",
    reference=owner_or_everyone,
    why="Five all-gathers and not one broadcast: nobody owns a layer. Every rank owns rows of every parameter, so "
    "every rank sends its rows and receives all others, at the same time and by the same amount. A broadcast would "
    "keep the links of one rank busy and leave the others idle. The paper that ZeRO comes from did describe "
    "broadcasts; FSDP has never issued one for parameters.",
    hints=(
        "Which rank holds the whole of a layer that could be broadcast, after fully_shard has cut every parameter?",
        "Count with torch.distributed.tensor.debug.CommDebugMode, around the forward alone.",
        "Shard 4 layers and then the model. get_comm_counts() is a dict from operation to count; look at those whose "
        "name has all_gather or allgather in it.",
    ),
    judge=Claim(
        statement="In forward, the rank that owns a layer broadcasts its weights, so FSDP needs no all-gather",
        measured="all-gathers in one forward",
        truth=in_forward,
        holds=lambda gathers: gathers == 0,
        counts="all_gather",
        beside=(("reduce_scatter", 0),),
        causes=(
            (9, "9 is a whole step; backward gathers the units again. Run the forward alone"),
            (1, "the whole model is one unit here; shard its layers first, each a unit"),
            (4, "the root is a unit too, of what the 4 leave to it: give the model one layer more"),
            (0, "nothing ran by that name, so something else brings the weights: print get_comm_counts() to see"),
        ),
    ),
    wrong=(
        mutant(
            {"model(torch.randn(2, 64))": "model(torch.randn(2, 64)).sum().backward()"},
            "9 is a whole step",
            name="with backward",
        ),
        mutant(
            {
                (
                    "for layer in list(model)[1:]:  # 4 units; the first Linear is left to the root\nfully_shard(layer)"
                ): ""
            },
            "the whole model is one unit here",
            name="one unit",
        ),
        mutant({"gathers == 0, gathers": "gathers == 0, gathers - 1"}, "the root is a unit too", name="no root"),
        mutant(
            {'"all_gather" in str(op) or "allgather" in str(op)': '"broadcast" in str(op)'},
            "something else brings the weights",
            name="counts broadcasts",
        ),
        mutant(
            {"gathers == 0": "gathers > 0"},
            "the number is right, 5 all-gathers in one forward, but",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda: (False, 5), "measure it"),),
    covers=("misconception 18", "coverage 004.21", "coverage 003.16"),
)
