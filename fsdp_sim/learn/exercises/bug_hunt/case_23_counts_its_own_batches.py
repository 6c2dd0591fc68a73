"""A training that hangs at the end of an epoch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import batches, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, LR = 3, 2.0


stub = Edit(
    {
        "steps = torch.tensor(len(rows))\ndist.all_reduce(steps, op=dist.ReduceOp.MIN)  # as many as everyone has": (
            ""
        ),
        "rows[: int(steps)]": "rows",
        '"steps": int(steps)': '"steps": len(rows)',
    }
)


def case_23(model, rows, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    steps = torch.tensor(len(rows))
    dist.all_reduce(steps, op=dist.ReduceOp.MIN)  # as many as everyone has
    for x in rows[: int(steps)]:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"steps": int(steps), "head": model.head.weight.to_local()}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model, least = net(draw), int(torch.randint(2, 5, (1,), generator=draw))
    return [(model, batches(draw, least + more), LR) for more in (2, 0, 1)]


def in_one_process(inputs: Inputs) -> list[dict[str, Any]]:
    return after(inputs, min(len(rows) for _, rows, _ in inputs))


def after(inputs: Inputs, steps: int) -> list[dict[str, Any]]:
    each = [[rows[min(step, len(rows) - 1)] for _, rows, _ in inputs] for step in range(steps)]
    head = trained(inputs[0][0], each, LR)[0]["head.weight"]
    return [{"steps": steps, "head": rows} for rows in head.chunk(RANKS)]


EXERCISE = Exercise(
    title="Mend an epoch that does not end",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="An epoch trains as it should and hangs in its last steps. With one data set it never does, with another "
    "always. Each rank is given the same model and its own batches, a list of tensors. Mend it: train as many steps "
    "as all ranks can do together, and return their number and this rank's rows of the head's weight. What is left "
    "over is not used.",
    reference=case_23,
    stub=stub,
    why="A file that does not divide evenly gives one rank a batch more. In that step its all-gather finds nobody. "
    "Before the loop all ranks agree on the smallest count: one all-reduce of one number. A loader that drops the "
    "last rows, or pads them, does the same. DDP has join() for it; FSDP has not, for a rank that has finished would "
    "still have to send its shards.",
    cause="each rank does as many steps as it has batches",
    hints=(
        "When a step begins, must every rank take part in it? Which rank does not?",
        "All ranks do the same number of steps. Which number can all of them do, and how does each learn of it?",
        "all_reduce a tensor with this rank's number of batches, with ReduceOp.MIN, and cut the list there.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                lambda inputs: after(inputs, max(len(rows) for _, rows, _ in inputs)),
                "ranks that had run out went on with their last batch again: those rows count twice",
            ),
            (
                lambda inputs: after(inputs, min(len(rows) for _, rows, _ in inputs) - 1),
                "all ranks had one batch more: nothing needs to be given up but what somebody lacks",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {"ReduceOp.MIN": "ReduceOp.MAX", "rows[: int(steps)]": "rows + rows[-1:] * (int(steps) - len(rows))"},
            "those rows count twice",
        ),
        mutant(
            {
                "dist.all_reduce(steps, op=dist.ReduceOp.MIN)  # as many as everyone has": (
                    "dist.all_reduce(steps, op=dist.ReduceOp.MIN)\nsteps -= 1"
                )
            },
            "all ranks had one batch more",
            name="one less",
        ),
        mutant(
            {"dist.all_reduce(steps, op=dist.ReduceOp.MIN)  # as many as everyone has": "steps -= 1"},
            "returned without calling",
        ),
        mutant(
            {"torch.tensor(len(rows))\ndist.all_reduce(steps, op=dist.ReduceOp.MIN)  # as many as everyone has": "1"},
            "expected",
        ),
    ),
    shortcuts=(
        mutant(
            {
                "for unit in (*model.layers, model):\nfully_shard(unit)": "",
                ".to_local()": ".chunk(RANKS)[dist.get_rank()]",
            },
            "expected",
            name="not sharded",
        ),
        Wrong(
            lambda model, rows, lr: {"steps": 3, "head": model.head.weight.chunk(RANKS)[dist.get_rank()]}, "expected"
        ),
    ),
    covers=("pitfall 2",),
    stub_says="returned without calling",
)
