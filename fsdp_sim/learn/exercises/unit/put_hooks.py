"""my_fsdp.py, chapter 04: the hooks."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.my_fsdp import put_hooks
from fsdp_sim.learn.judges.mine import PLAIN, RECOMPUTED, InMyFile


def is_torchs(unit):
    import torch.distributed.fsdp

    torch.distributed.fsdp.fully_shard(unit.module)


def is_torchs_by_another_name(unit):
    import torch

    getattr(getattr(torch.distributed, "fs" + "dp"), "fully" + "_shard")(unit.module)


def reads_the_reference(unit):
    from fsdp_sim.learn.exercises import my_fsdp

    my_fsdp.put_hooks(unit)


REPLACES = """import torch.distributed as dist
gather = dist.all_gather_into_tensor
dist.all_gather_into_tensor = lambda *given, **more: gather(*given, **more)
"""

EXERCISE = Exercise(
    title="Put the hooks into your FSDP",
    kind=ExerciseKind.CODE,
    difficulty=4,
    importance=5,
    minutes=30,
    contract="Your own my_fsdp.py has a Unit that can unshard() (issue the all-gather), wait() (for it, and put whole "
    "parameters on the modules), reshard(), reduce() (the gradients), after_forward() and prefetch() (parts of later "
    "chapters). Call them at the right moments. Put a forward pre-hook (prepended, with kwargs) and a forward hook on "
    "unit.module; the first returns unit.on_inputs(post_backward, args, kwargs), the second unit.on_outputs("
    "pre_backward, output), which call your functions without arguments when backward comes by.",
    reference=put_hooks,
    why="Four moments of a unit's life: whole before its forward, sharded after it, whole again before its backward, "
    "sharded and reduced after it. A module has hooks for the first two. For the others the file puts a hook on the "
    "outputs, whose gradients come first, and a node of autograd on the inputs, whose gradients come last. What may "
    "overlap is asked for in between: prefetch comes when this unit's own parameters have arrived.",
    hints=(
        "Four functions, for before and after forward, before and after backward. Which two must make the unit whole?",
        "Before a pass: unshard, then wait. After a pass: reshard; after backward also reduce.",
        "pre_forward and pre_backward both unshard and wait; post_forward calls unit.after_forward(), post_backward "
        "reshards and reduces; pre_backward ends with unit.prefetch().",
    ),
    judge=InMyFile("put_hooks", (PLAIN, RECOMPUTED)),
    wrong=(
        mutant({"unit.after_forward()": ""}, "issues other collectives"),
        mutant({"unit.after_forward()": "unit.reshard()"}, "issues other collectives", name="reshards the root too"),
        mutant({"unit.prefetch()": ""}, "issues other collectives"),
        mutant(
            {"unit.wait()\nreturn": "return"},
            "mixed torch.Tensor and DTensor",
            name="never waits",
        ),
        mutant({"unit.reshard()\nunit.reduce()": "unit.reduce()"}, "is missing", name="stays whole"),
        mutant({"unit.reduce()": ""}, "the gradient of blocks.2.down.bias in step 1 is missing"),
    ),
    shortcuts=(
        Wrong(is_torchs, "torch's own FSDP is what this file replaces"),
        Wrong(is_torchs_by_another_name, "torch's own FSDP is what this file replaces"),
        Wrong(reads_the_reference, "it uses `fsdp_sim."),
        mutant({"def pre_forward(": f"{REPLACES}def pre_forward("}, "your code replaced", name="replaces a collective"),
    ),
    covers=("coverage 004.88", "coverage 004.31"),
)
