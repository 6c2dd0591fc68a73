"""my_fsdp.py, chapter 08: gradients of several micro-batches, in the precision of the reduction."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, mutant
from fsdp_sim.learn.exercises.my_fsdp import add_gradient
from fsdp_sim.learn.judges.mine import MIXED, InMyFile

EXERCISE = Exercise(
    title="Add up gradients in your FSDP",
    kind=ExerciseKind.CODE,
    difficulty=2,
    importance=4,
    minutes=10,
    contract="In my_fsdp.py, add_gradient(earlier, found, dtype) is called when backward has found a gradient of a "
    "parameter, whole and in the dtype of compute. earlier is what it returned for the micro-batch before, or None. "
    "dtype is the policy's reduce_dtype, or None: then the gradient keeps its own. Return the sum in that dtype; each "
    "found one is cast before it is added. The memory of earlier may be used again.",
    reference=add_gradient,
    why="Sums are where bfloat16 loses: with 8 bits, small contributions vanish beside large ones. So gradients are "
    "cast up to the dtype of the reduction first and then added, by micro-batch here, over ranks in the "
    "reduce-scatter. Added in place, one whole gradient is alive and not two.",
    hints=(
        "In which precision should a sum of many numbers be made: before or after the cast?",
        "Cast what was found; if there is an earlier sum, add to it in place.",
        "found.to(dtype or found.dtype), then found itself if earlier is None, else earlier.add_(...).",
    ),
    judge=InMyFile("add_gradient", (MIXED,)),
    wrong=(
        mutant({"earlier.add_(found)": "found"}, "is not torch's", name="the last one"),
        mutant({"found = found.to(dtype or found.dtype)": ""}, "is not torch's", name="adds in bfloat16"),
        mutant({"earlier.add_(found)": "earlier.add_(found).div_(2)"}, "0.5 times as large", name="their mean"),
        mutant({"earlier.add_(found)": "earlier"}, "is not torch's", name="the first one"),
    ),
    shortcuts=(
        mutant({"return found if earlier is None else earlier.add_(found)": "return found * 0"}, "is not torch's"),
        mutant({"found = found": "exec('')\nfound = found"}, "it uses `exec`", name="runs a text"),
    ),
    covers=("coverage 002.8", "coverage 003.17"),
)
