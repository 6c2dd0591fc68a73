"""my_fsdp.py, chapter 07: what becomes of a unit after its forward."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, mutant
from fsdp_sim.learn.exercises.my_fsdp import after_forward
from fsdp_sim.learn.judges.mine import PLAIN, RECOMPUTED, TWICE, InMyFile

EXERCISE = Exercise(
    title="Let your FSDP reshard after forward, and recompute",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="In my_fsdp.py, after_forward(unit) is called when a unit's forward has ended. Reshard it (reshard()) as "
    "unit.reshard_after_forward says: True, False, or None, which means all units but the root (unit.is_root). Then "
    "note its place: append len(unit.order) to unit.places, and the unit to unit.order, for backward to come back. If "
    "unit.in_backward_of_model is true, checkpointing runs this forward again: leave everything as it is.",
    reference=after_forward,
    why="Resharding is what saves memory between forward and backward, at the price of a second all-gather. The root "
    "would be gathered again at once, as backward begins with it, so it stays. A forward that activation checkpointing "
    "runs again in backward is followed by the backward of the same unit: to reshard it then would gather it a third "
    "time, and its place in the order has been noted before.",
    hints=(
        "Whose parameters are needed again at once after forward? And whose after a forward that is recomputed?",
        "Three questions in turn: is this a recomputation; what does None mean for this unit; where does it stand?",
        "Return if in_backward_of_model; None becomes `not unit.is_root`; reshard if so; append to places, then order.",
    ),
    judge=InMyFile("after_forward", (PLAIN, TWICE, RECOMPUTED)),
    wrong=(
        mutant({"reshard = not unit.is_root": "reshard = True"}, "issues other collectives", name="the root too"),
        mutant({"reshard = not unit.is_root": "reshard = False"}, "issues other collectives", name="never by itself"),
        mutant(
            {"if unit.in_backward_of_model:": "if False:"},
            "issues other collectives",
            name="reshards what was just recomputed",
        ),
        mutant({"if reshard:": "if True:"}, "issues other collectives", name="whatever is asked"),
        mutant(
            {"unit.places.append(len(unit.order))\nunit.order.append(unit)": ""},
            "issues other collectives",
            name="forgets the order",
        ),
    ),
    shortcuts=(
        mutant({"if reshard:\nunit.reshard()": ""}, "issues other collectives", name="keeps everything"),
        mutant(
            {"reshard = unit.reshard_after_forward": "reshard = open('my_fsdp.py') and None"},
            "it uses `open`",
            name="reads a file",
        ),
    ),
    covers=("coverage 004.37", "coverage 002.22"),
)
