"""How many all-gathers does one training step issue?"""

from __future__ import annotations

import random

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op


def all_gathers_per_step(layers, reshard_after_forward):
    forward = layers + 1
    backward = {True: layers + 1, None: layers, False: 0}[reshard_after_forward]
    return forward + backward


def counted(layers: int, reshard_after_forward: bool | None) -> int:
    """In the program that the simulator builds, which equals the one torch issues."""
    program = toy_program(layers, world_size=4, plan=Plan(reshard_after_forward=reshard_after_forward))
    return sum(instruction.op is Op.ALL_GATHER for instruction in program.ops)


def cases(draw: random.Random) -> list[tuple[int, bool | None]]:
    return [(layers, keep) for layers in draw.sample(range(1, 30), 3) for keep in (None, True, False)]


WRONG = (
    Wrong(
        lambda layers, keep: layers + 1,
        "you counted the forward only; a unit that was freed is gathered again in backward",
    ),
    Wrong(
        lambda layers, keep: 2 * (layers + 1),
        "with None the root keeps its parameters after forward, with False every unit does",
    ),
    Wrong(
        lambda layers, keep: layers if keep is False else 2 * layers,
        "the root is a unit too: embeddings, last norm and head",
    ),
    Wrong(
        lambda layers, keep: layers + 1 if keep is False else 2 * (layers + 1),
        "None is not True: backward begins with the root, so by default the root keeps its parameters",
    ),
)
SHORTCUTS = (
    Wrong(lambda layers, keep: {(4, True): 10, (4, None): 9, (4, False): 5}.get((layers, keep), 25), "expected"),
)

EXERCISE = Exercise(
    title="Count the all-gathers",
    kind=ExerciseKind.NUMBER,
    difficulty=1,
    importance=5,
    minutes=5,
    contract="Given the number of blocks and fully_shard's reshard_after_forward (True, False or None), return how "
    "many all-gathers one training step issues: each block is a unit, what is left is the root.",
    reference=all_gathers_per_step,
    why="Forward gathers every unit once: the blocks and the root. Backward gathers again what forward has freed: with "
    "True every unit, with None all but the root, whose backward comes first, and with False nothing.",
    hints=(
        "A unit that was freed after its forward must be whole again for its backward.",
        "Count the bars of one rank's row all-gather in a drawn step: the blocks and the root in forward. Which come "
        "back in backward? Is the root among them?",
        "Forward is layers + 1; backward is layers + 1, layers or 0, depending on what was kept.",
    ),
    judge=Numbers(
        truth=counted,
        source="counted in the program that torch issues",
        cases=cases,
        where="for {layers} blocks and reshard_after_forward={reshard_after_forward}",
        unit="all-gathers",
    ),
    wrong=WRONG,
    shortcuts=SHORTCUTS,
    covers=("coverage 000.12", "misconception 3", "misconception 5"),
)
