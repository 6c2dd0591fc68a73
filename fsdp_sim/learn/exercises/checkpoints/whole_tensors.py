"""my_fsdp.py, chapter 09: the whole model on rank 0."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.my_fsdp import whole_tensors
from fsdp_sim.learn.judges.mine import SAVED, InMyFile


def asks_torch(tensors):
    return {name: tensor.full_tensor() for name, tensor in tensors.items()}


EXERCISE = Exercise(
    title="Save the whole model of your FSDP",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=4,
    minutes=25,
    contract="In my_fsdp.py, whole_tensors(tensors) is given a dict of names and DTensors, cut on dim 0 as in chapter "
    "3: tensor.size(0) rows in all, of which to_local() are this rank's, fewer or none on the last ranks. Every rank "
    "calls it. Return on rank 0 a dict of the same names and whole plain tensors on the CPU, for a file that one "
    "process can load; on all other ranks an empty dict. Gather one after the other.",
    reference=whole_tensors,
    why="An all-gather takes pieces of equal size, so a rank pads its rows to what the first one has, and what is too "
    "much falls off the end. All ranks take part in each gather, even those that keep nothing: if only rank 0 called, "
    "it would wait for ever. Moved to the CPU one by one, the whole model never stands on a GPU.",
    hints=(
        "Who has to take part in an all-gather, and of what size must every rank's piece be?",
        "Pad this rank's rows with zeros to the rounded quotient, gather, and keep the first size(0) rows, on rank 0.",
        "rows = -(-tensor.size(0) // world size); new_zeros(rows, ...), copy own rows in, all_gather_into_tensor; on "
        "rank 0 found[name] = whole[: tensor.size(0)].cpu().",
    ),
    judge=InMyFile("whole_tensors", (SAVED,)),
    wrong=(
        mutant({"if dist.get_rank() == 0:": "if True:"}, "on rank 1 there is", name="on every rank"),
        mutant({"whole[: tensor.size(0)]": "whole"}, "of shape", name="with padding"),
        mutant({"padded[: len(own)] = own": ""}, "is not torch's", name="zeros"),
        mutant(
            {"dist.all_gather_into_tensor(whole, padded)": "whole[: len(own)] = own"}, "is not torch's", name="own rows"
        ),
        mutant(
            {"for name, tensor in tensors.items():": "for name, tensor in [*tensors.items()][dist.get_rank() * 99 :]:"},
            "all_gather",
            name="rank 0 alone",
        ),
        Wrong(asks_torch, "it calls `full_tensor`"),
    ),
    shortcuts=(
        Wrong(lambda tensors: {}, "beginning with def"),
        mutant(
            {"return found": "return {name: tensor.to_local() for name, tensor in tensors.items()}"},
            "on rank 0 embed.weight is",
        ),
    ),
    covers=("misconception 29", "coverage 004.49"),
)
