"""Prefetching two units ahead makes torch gather more: true or false?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

BLOCKS = 4


def gathers_with_prefetch():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))
    blocks = [fully_shard(block) for block in list(model)[1:]]  # 4 units; the first Linear is left to the root
    fully_shard(model)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
    with CommDebugMode() as counted:
        model(torch.randn(2, 64)).sum().backward()
    gathers = sum(n for op, n in counted.get_comm_counts().items() if "all_gather" in str(op) or "allgather" in str(op))
    return gathers == 9, gathers


def in_the_program() -> int:
    """All-gathers of one step, in the program that the simulator builds with a prefetch of two."""
    return gathers_of(Plan(forward_prefetch=2))


def gathers_of(plan: Plan) -> int:
    return sum(instruction.op is Op.ALL_GATHER for instruction in toy_program(BLOCKS, world_size=2, plan=plan).ops)


EXERCISE = Exercise(
    title="Settle whether prefetch gathers more",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=10,
    contract='"A forward prefetch of two units costs nothing on the wire: FSDP2 gathers as often as without." On 2 '
    "ranks, give each of 4 units the list of the next two (set_modules_to_forward_prefetch), leave fully_shard's other "
    "settings alone, and count the all-gathers of one step (forward and backward) of the units and a root. Return "
    "(True or False, the number of all-gathers).",
    reference=gathers_with_prefetch,
    why="Nine, as without: five in forward, four in backward. unshard() of a unit that is whole, or on its way, does "
    "nothing, so a unit that was asked for early is not asked for again. Prefetch moves an all-gather to an earlier "
    "place in the queue. What it costs is memory, for what arrives early waits somewhere.",
    hints=(
        "What does a unit's own pre_forward find when somebody has asked for it already?",
        "Count over the whole step with torch.distributed.tensor.debug.CommDebugMode, then compare with no lists at "
        "all: 5 in forward, and in backward all but the root's.",
        "Shard 4 layers, then the model; layer i gets layers[i + 1 : i + 3]; count through forward and backward.",
    ),
    judge=Claim(
        statement="With a forward prefetch of two units FSDP2 gathers as often as without",
        measured="all-gathers in one step",
        truth=in_the_program,
        holds=lambda gathers: gathers == gathers_of(Plan()),
        counts="all_gather",
        calls=(FSDPModule, "set_modules_to_forward_prefetch"),
        beside=(("reduce_scatter", BLOCKS + 1),),
        causes=(
            (5, "that is the forward alone; count the whole step"),
            (10, "10 is with reshard_after_forward=True also for the root, which is not the default"),
        ),
    ),
    wrong=(
        mutant({".sum().backward()": ""}, "that is the forward alone", name="forward alone"),
        mutant(
            {"fully_shard(model)": "fully_shard(model, reshard_after_forward=True)"},
            "which is not the default",
            name="root freed",
        ),
        mutant(
            {"block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])": "pass"},
            "set_modules_to_forward_prefetch was called, so this is another experiment",
            name="no lists",
        ),
        mutant(
            {"gathers == 9": "gathers > 9"},
            "the number is right, 9 all-gathers in one step, but",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda: (True, 9), "so this is another experiment"),),
    covers=("coverage 000.21", "coverage 004.103", "misconception 4.114"),
)
