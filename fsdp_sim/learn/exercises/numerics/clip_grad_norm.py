"""my_fsdp.py, chapter 08: clipping by the norm of all ranks' shards."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.my_fsdp import clip_grad_norm
from fsdp_sim.learn.judges.mine import MIXED, InMyFile


def is_torchs(parameters, max_norm):
    import torch

    return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


EXERCISE = Exercise(
    title="Clip the gradients of your FSDP",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=4,
    minutes=25,
    contract="In my_fsdp.py, clip_grad_norm(parameters, max_norm) clips as torch.nn.utils.clip_grad_norm_ does, bit "
    "for bit: gradients are DTensors, whose to_local() are this rank's rows. Scale all in place by max_norm / (norm + "
    "1e-6), at most 1, and return the norm. torch takes the norm of each parameter first (its square summed over the "
    "ranks, then the root), and then the norm of these norms. One all-reduce must do; gradients may be missing.",
    reference=clip_grad_norm,
    why="Squares may be added up over the ranks, norms may not. One number for each parameter travels in a single "
    "all-reduce, whatever the size of the model. In which order the squares are added decides the last bit: over the "
    "rows of a rank, over the ranks, over the parameters. Bit for bit one has torch's norm only in torch's order.",
    hints=(
        "What of a rank's norm of its rows may be added up over the ranks, and what has to be done before and after?",
        "Stack the norms of local gradients into one tensor: square, all_reduce, root, then the norm of that tensor.",
        "torch._foreach_norm and torch.stack, ** 2, dist.all_reduce, .sqrt(), torch.linalg.vector_norm; then "
        "torch._foreach_mul_ with torch.clamp(..., max=1.0), all under torch.no_grad().",
    ),
    judge=InMyFile("clip_grad_norm", (MIXED,)),
    wrong=(
        mutant({"dist.all_reduce(squares)": ""}, "the norm of step 1 is not torch's", name="its own rows"),
        mutant(
            {" ** 2  # one": "  # one", "squares.sqrt()": "squares"},
            "the norm of step 1 is not torch's",
            name="adds norms",
        ),
        mutant({", max=1.0": ", max=0.5"}, "is not torch's", name="at most a half"),
        mutant({"total + 1e-6": "total * 2"}, "0.5 times as large", name="twice the norm"),
        mutant({"torch._foreach_mul_(": "torch._foreach_mul("}, "is not torch's", name="not in place"),
        mutant(
            {"dist.all_reduce(squares)": "for square in squares.unbind():\n    dist.all_reduce(square)"},
            "clipping takes one for each step",
            name="one by one",
        ),
    ),
    shortcuts=(
        Wrong(is_torchs, "it uses `clip_grad_norm_`"),
        mutant({"return total": "return total * 0"}, "the norm of step 1 is not torch's", name="no norm"),
    ),
    covers=("pitfall 26", "coverage 004.98"),
)
