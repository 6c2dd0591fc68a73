"""Which hooks of a unit run in forward?"""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges import OperationOrder
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import Phase


def hooks_in_forward():
    return ["pre_forward", "unshard", "wait_for_unshard", "post_forward", "reshard"]


def entered() -> list[str]:
    """By one block, in the program of torch's fully_shard."""
    return [
        i.hook for i in toy_program(3, world_size=2) if i.hook and i.unit == "layers.1" and i.phase is Phase.FORWARD
    ]


EXERCISE = Exercise(
    title="Name the hooks of a unit's forward",
    kind=ExerciseKind.ORDER,
    difficulty=1,
    importance=3,
    minutes=5,
    contract="Return the names of the five hooks that one block (not the root) enters in its forward, in order, as "
    "torch's fully_shard calls them, without arguments: the third is 'wait_for_unshard'.",
    reference=hooks_in_forward,
    why="The module calls two, pre_forward and post_forward. The first asks for the parameters (unshard) and waits "
    "until they are there (wait_for_unshard), the second lets go of them (reshard). Asking and waiting are two, so "
    "that someone may ask earlier: that is prefetch.",
    hints=(
        "Two hooks are called by the module: before its forward and after it. Each calls others.",
        "The first is pre_forward. What makes the unit whole, and what frees it?",
        "pre_forward, then the asking, then wait_for_unshard, then post_forward, and what that does last.",
    ),
    judge=OperationOrder(
        truth=entered,
        source="so torch's fully_shard calls them",
        because={
            "pre_forward": "the module calls this hook before its forward, and everything else follows from it",
            "wait_for_unshard": "what was asked for must have arrived before forward computes",
            "unshard": "the unit must be made whole before its forward",
            "post_forward": "the module calls this hook after its forward",
            "reshard": "what was gathered is freed again after forward",
        },
    ),
    wrong=(
        Wrong(
            lambda: ["unshard", "wait_for_unshard", "pre_forward", "post_forward", "reshard"],
            "pre_forward is what calls unshard and wait_for_unshard, so it is entered first",
        ),
        Wrong(
            lambda: ["pre_forward", "unshard", "wait_for_unshard", "reshard", "post_forward"],
            "post_forward is what calls reshard, so it is entered first",
        ),
        Wrong(
            lambda: ["pre_forward", "wait_for_unshard", "unshard", "post_forward", "reshard"],
            "one can only wait for what one has asked for: unshard comes before wait_for_unshard",
        ),
    ),
    shortcuts=(
        Wrong(lambda: ["wait_for_unshard"] * 5, "place 1 of 5"),
        Wrong(lambda: "pre_forward unshard wait_for_unshard post_forward reshard", "a list of labels is asked for"),
    ),
    covers=("coverage 000.12", "coverage 002.22"),
)
