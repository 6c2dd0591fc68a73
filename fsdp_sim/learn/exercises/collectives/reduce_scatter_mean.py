"""my_fsdp.py, chapter 02: the collective that reduces gradients."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.my_fsdp import reduce_scatter_mean
from fsdp_sim.learn.judges.mine import MIXED, PLAIN, InMyFile


def case_38(rows, group):
    import torch.distributed as dist

    work = dist.all_reduce(rows, op=dist.ReduceOp.AVG, group=group, async_op=True)
    return rows[dist.get_rank(group)], work


EXERCISE = Exercise(
    title="Give your FSDP its reduce-scatter",
    kind=ExerciseKind.CODE,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="The first part of your own my_fsdp.py. rows is a tensor of one row for each rank of group: gradients, "
    "laid out so that row r belongs to rank r. Issue the reduce-scatter of their mean over the ranks, and return two "
    "things without waiting: the tensor in which this rank's row will be, and the work to wait for. "
    "(dist.reduce_scatter_tensor takes the rows as one flat tensor, rows.flatten().)",
    reference=reduce_scatter_mean,
    why="A rank needs the mean of its own row alone, so a reduce-scatter suffices where DDP takes an all-reduce. It is "
    "issued and not waited for: backward of the next unit runs meanwhile, and whoever needs the result waits then. The "
    "mean, because each rank's loss is the mean of its own part of the batch.",
    hints=(
        "Which collective gives each rank one reduced piece? Of what size is what this rank receives?",
        "The output is one row; async_op=True gives a work in place of waiting, and ReduceOp.AVG the mean.",
        "own = torch.empty_like(rows[0]); dist.reduce_scatter_tensor takes own, the rows as one flat view, op, group, "
        "async_op=True, and returns the work.",
    ),
    judge=InMyFile(
        "reduce_scatter_mean",
        (PLAIN, MIXED),
        gives=("the tensor in which this rank's row will be", "the work to wait for"),
        waits=False,
    ),
    wrong=(
        mutant({"ReduceOp.AVG": "ReduceOp.SUM"}, "a sum over 2 ranks"),
        mutant({"ReduceOp.AVG": "ReduceOp.MAX"}, "is not torch's"),
        mutant({", async_op=True": ""}, "it waits for its collective"),
        mutant({"return own, work": "work.wait()\nreturn own, work"}, "it waits for its collective", name="waits"),
        mutant({"return own, work": "return own"}, "reduce_scatter_mean returns 2 things", name="no work"),
        mutant({"return own, work": "return rows[dist.get_rank()], work"}, "is not torch's", name="its own gradients"),
        Wrong(case_38, "issues other collectives"),
    ),
    shortcuts=(
        mutant({"return own, work": "return own * 0, work"}, "is not torch's", name="nothing"),
        mutant(
            {"own = torch": "from torch.distributed._composable import fsdp\nown = torch"},
            "torch's own FSDP is what this file replaces",
            name="imports torch's",
        ),
    ),
    covers=("coverage 004.57", "misconception 14"),
)
