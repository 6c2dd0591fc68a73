"""With reshard_after_forward=False backward gathers nothing: true or false?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

BLOCKS = 4


def kept_for_backward():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    for block in list(model)[1:]:  # 4 units; the first Linear is left to the root
        fully_shard(block, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    with CommDebugMode() as counted:
        model(torch.randn(2, 64)).sum().backward()
    gathers = sum(n for op, n in counted.get_comm_counts().items() if "all_gather" in str(op) or "allgather" in str(op))
    return gathers == 5, gathers


def in_the_program() -> int:
    """All-gathers of one step, in the program that the simulator builds."""
    program = toy_program(BLOCKS, world_size=2, plan=Plan(reshard_after_forward=False))
    return sum(instruction.op is Op.ALL_GATHER for instruction in program.ops)


EXERCISE = Exercise(
    title="Settle whether backward gathers what was kept",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=10,
    contract='"With reshard_after_forward=False FSDP2 skips the all-gathers of backward." On 2 ranks, run one step '
    "(forward and backward) of a small model of 4 units and a root with torch's fully_shard and count its all-gathers. "
    "Return (True or False, the number of all-gathers in the step).",
    reference=kept_for_backward,
    why="Five: one for each unit and the root, all in forward. What was not freed is still whole when backward comes, "
    "so there is nothing to gather; with the default it would be nine, for the root alone is kept. The price is "
    "memory: every unit stays whole from its forward to its backward, which is ZeRO-2's way.",
    hints=(
        "What would an all-gather in backward bring that is not already there?",
        "Count over the whole step, with torch.distributed.tensor.debug.CommDebugMode; what if backward adds none?",
        "Shard 4 layers and then the model, count through one forward and backward, compare with 4 + 1.",
    ),
    judge=Claim(
        statement="With reshard_after_forward=False FSDP2 skips the all-gathers of backward",
        measured="all-gathers in one step",
        truth=in_the_program,
        holds=lambda gathers: gathers == BLOCKS + 1,
        counts="all_gather",
        beside=(("reduce_scatter", BLOCKS + 1),),
        causes=(
            (9, "9 is torch's default, which frees every unit but the root after forward"),
            (4, "the root is a unit too, of what the 4 leave to it: give the model one layer more"),
            (1, "the whole model is one unit here; shard its layers first, each a unit"),
            (0, "you counted the backward alone; count the whole step"),
        ),
    ),
    wrong=(
        mutant(
            {
                "fully_shard(block, reshard_after_forward=False)": "fully_shard(block)",
                "fully_shard(model, reshard_after_forward=False)": "fully_shard(model)",
            },
            "9 is torch's default, which frees every unit but the root after forward",
            name="with the default",
        ),
        mutant(
            {' if "all_gather" in str(op) or "allgather" in str(op)': ""},
            "how many collectives there were of any kind; count each all-gather",
            name="counts reductions too",
        ),
        mutant({"gathers == 5, gathers": "gathers == 5, gathers - 1"}, "the root is a unit too", name="root forgotten"),
        mutant(
            {
                "with CommDebugMode() as counted:\nmodel(torch.randn(2, 64)).sum().backward()": (
                    "loss = model(torch.randn(2, 64)).sum()\nwith CommDebugMode() as counted:\n    loss.backward()"
                )
            },
            "you counted the backward alone",
            name="backward alone",
        ),
        mutant(
            {"gathers == 5": "gathers != 5"},
            "the number is right, 5 all-gathers in one step, but",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda: (True, 5), "measure it"),),
    covers=("misconception 4", "misconception 14", "coverage 002.10"),
)
