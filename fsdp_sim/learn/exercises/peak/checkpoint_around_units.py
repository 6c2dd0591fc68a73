"""Does a checkpoint around a sharded block double its all-gathers?"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Claim
from fsdp_sim.schedule import toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

BLOCKS = 4


def checkpoint_around_units():
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    for block in blocks:
        fully_shard(block)
    model = nn.Sequential(nn.Linear(64, 64), *map(checkpoint_wrapper, blocks))
    fully_shard(model)
    with CommDebugMode() as counted:
        model(torch.randn(2, 64)).sum().backward()
    gathers = sum(n for op, n in counted.get_comm_counts().items() if "all_gather" in str(op) or "allgather" in str(op))
    return gathers == 9, gathers


def in_the_program() -> int:
    """All-gathers of one step with every block computed again, in the program that the simulator builds."""
    program = toy_program(BLOCKS, world_size=2, plan=Plan(activation_checkpointing="full"))
    return sum(instruction.op is Op.ALL_GATHER for instruction in program.ops)


EXERCISE = Exercise(
    title="Settle whether checkpointing gathers once more",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=10,
    contract='"A checkpoint around a sharded block adds no all-gather, though its forward runs again." On 2 ranks, '
    "take 4 blocks, each sharded by fully_shard and then put into torch's checkpoint_wrapper, after one linear "
    "layer, and shard the model. Count the all-gathers of one step (without checkpoints they are 9). Return (True or "
    "False, the number).",
    reference=checkpoint_around_units,
    why="Nine, as without: the block runs again inside its own backward, where FSDP has gathered it anyway. It stays "
    "whole for both. So checkpointing costs compute (a forward more, about a third of a step) and no communication, in "
    "torch 2.13 with the checkpoint inside the unit or around it.",
    hints=(
        "When does the forward of a checkpointed block run again? What does the unit need just then anyway?",
        "Count over a whole step with CommDebugMode; 9 are 4 blocks twice and the root once.",
        "fully_shard each block, put checkpoint_wrapper around it, fully_shard the model; compare with 9.",
    ),
    judge=Claim(
        statement="A checkpoint around a sharded block adds no all-gather",
        measured="all-gathers in one step",
        truth=in_the_program,
        holds=lambda gathers: gathers == 2 * BLOCKS + 1,
        counts="all_gather",
        calls=(CheckpointWrapper, "forward"),
        beside=(("reduce_scatter", BLOCKS + 1),),
        causes=(
            (3 * BLOCKS + 1, "that would be one more for each block; count what the ranks issue"),
            (2 * BLOCKS + 2, "the root was gathered again too: with the default it stays whole after forward"),
            (BLOCKS + 1, "the units were kept whole after forward; leave reshard_after_forward at its default"),
        ),
    ),
    wrong=(
        mutant(
            {"map(checkpoint_wrapper, blocks)": "blocks"},
            "no CheckpointWrapper.forward was called, so this is another experiment",
            name="no checkpoint",
        ),
        mutant(
            {"gathers == 9, gathers": "False, 3 * BLOCKS + 1"},
            "that would be one more for each block; count what the ranks issue",
            name="thrice",
        ),
        mutant(
            {"fully_shard(model)": "fully_shard(model, reshard_after_forward=True)"},
            "the root was gathered again too",
            name="root too",
        ),
        mutant(
            {
                "fully_shard(block)": "fully_shard(block, reshard_after_forward=False)",
                "fully_shard(model)": "fully_shard(model, reshard_after_forward=False)",
            },
            "the units were kept whole after forward",
            name="kept whole",
        ),
        mutant(
            {"gathers == 9": "gathers > 9"},
            "the number is right, 9 all-gathers in one step, but",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda: (True, 9), "so this is another experiment"),),
    covers=("misconception 27", "coverage 001.52", "coverage 002.29"),
)
