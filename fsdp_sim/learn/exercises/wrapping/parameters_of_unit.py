"""my_fsdp.py, chapter 06: what belongs to a unit."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, mutant
from fsdp_sim.learn.exercises.my_fsdp import parameters_of_unit
from fsdp_sim.learn.judges.mine import PLAIN, InMyFile

EXERCISE = Exercise(
    title="Say which parameters are in a unit of your FSDP",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="In my_fsdp.py, fully_shard(module) makes one unit of all parameters of the module and of the modules "
    "below it, but those of units that were made before (each such module has an attribute `unit`, and keeps all that "
    "is below it). Return a dict: for each parameter, once, a list of its owners as pairs (the module that holds it, "
    "the name that it has there). Tied weights have several owners. The order is that of module.modules().",
    reference=parameters_of_unit,
    why="A parameter belongs to the innermost unit around it, which is why inner modules are sharded first: the root "
    "takes what is left. The owners are needed because unshard and reshard put another tensor in the parameter's "
    "place: a tied weight has two places, and if one were forgotten, two would compute with different tensors.",
    hints=(
        "Which modules are inside a unit that is there already? Their own submodules are, too.",
        "Walk module.modules() twice: to find those inside units, then to look at what each other module holds itself.",
        "named_parameters(recurse=False) of each module not inside; setdefault(param, []).append((owner, name)).",
    ),
    judge=InMyFile("parameters_of_unit", (PLAIN,)),
    wrong=(
        mutant({"if owner not in inside:": "if True:"}, "is in another unit already", name="all of them"),
        mutant(
            {" for m in inner.modules()}": " for m in [inner]}"}, "is in another unit already", name="one level deep"
        ),
        mutant(
            {"owners.setdefault(param, []).append((owner, name))": "owners[param] = [(owner, name)]"},
            "which torch's fully_shard does not have there",
            name="one owner of tied weights",
        ),
        mutant({"named_parameters(recurse=False)": "named_parameters()"}, "is in another unit already"),
    ),
    shortcuts=(
        mutant({"return owners": "return {}"}, "on rank 0 ", name="none"),
        mutant(
            {"owners = {}": "import sys\nowners = {}"},
            "it uses `sys`; a part of my_fsdp.py takes no more",
            name="looks round",
        ),
    ),
    covers=("coverage 002.13", "coverage 004.65"),
)
