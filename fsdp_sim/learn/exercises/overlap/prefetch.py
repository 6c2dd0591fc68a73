"""my_fsdp.py, chapter 05: the unit that comes next."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, mutant
from fsdp_sim.learn.exercises.my_fsdp import prefetch
from fsdp_sim.learn.judges.mine import PLAIN, TWICE, InMyFile

EXERCISE = Exercise(
    title="Let your FSDP prefetch in backward",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="In my_fsdp.py, prefetch(unit) is called when backward has come to a unit and its parameters have "
    "arrived, before its backward computes. Issue the all-gather (unshard()) of the unit that backward comes to next. "
    "unit.order lists the model's units as their forwards ended, and unit.places this unit's places in it: one for "
    "each forward whose backward is still to come, so take the last one out. Beware of the unit that was first.",
    reference=prefetch,
    why="Backward goes through the units in the reverse of the order in which forward left them, so the next one "
    "stands one place before. Asked for now, it travels while this unit computes. A unit that was called twice stands "
    "there twice, and backward comes to its later call first. Before the first unit there is none: index -1 would be "
    "the last.",
    hints=(
        "In what order does backward come to the units, compared with the order of their forwards?",
        "The place of this forward is the last of unit.places; the next unit stands in unit.order one place before.",
        "place = unit.places.pop(), if there is one; if place is above 0, unit.order[place - 1] is to be unsharded.",
    ),
    judge=InMyFile("prefetch", (PLAIN, TWICE)),
    wrong=(
        mutant({"unit.order[place - 1].unshard()": "pass"}, "issues other collectives", name="never"),
        mutant({"place - 1": "(place + 1) % len(unit.order)"}, "issues other collectives", name="the one after"),
        mutant({"place > 0": "place > 1"}, "issues other collectives", name="the first never"),
        mutant({"unit.order[place - 1].unshard()": "unit.unshard()"}, "issues other collectives", name="itself"),
    ),
    shortcuts=(
        mutant(
            {"unit.order[place - 1].unshard()": "for other in unit.order:\n    other.unshard()"},
            "issues other collectives",
            name="all at once",
        ),
        mutant(
            {"if unit.places:": "import fsdp_sim.mini\nif unit.places:"},
            "it uses `fsdp_sim.mini`",
            name="imports the mini",
        ),
    ),
    covers=("coverage 002.18", "coverage 004.25"),
)
