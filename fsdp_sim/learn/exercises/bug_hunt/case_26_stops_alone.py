"""A job hangs as soon as one rank's loss is bad."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, STEPS, NUMBERS, LIMIT = 4, 6, 20_000, 10.0


stub = Edit(
    {
        (
            "bad = torch.tensor(float(loss > limit))\n"
            "dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # the decision is everyone's\n"
            "if bad:"
        ): "if loss > limit:  # training diverges: stop"
    }
)


def case_26(losses, gradients, limit):
    weights, steps = torch.zeros_like(gradients[0]), 0
    for loss, gradient in zip(losses, gradients, strict=True):
        bad = torch.tensor(float(loss > limit))
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # the decision is everyone's
        if bad:
            break
        dist.all_reduce(gradient)
        weights -= gradient / dist.get_world_size()
        steps += 1
    return {"steps": steps, "weights": weights}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    losses = torch.rand(RANKS, STEPS, generator=draw) * LIMIT * 0.9
    odd, step = (
        int(torch.randint(1, RANKS, (1,), generator=draw)),
        int(torch.randint(2, STEPS - 1, (1,), generator=draw)),
    )
    losses[odd, step] = 1.5 * LIMIT  # of one rank only, and of no rank 0
    gradients = torch.randn(RANKS, STEPS, NUMBERS, generator=draw)
    return [(losses[rank].tolist(), list(gradients[rank].unbind()), LIMIT) for rank in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[dict[str, Any]]:
    return trained(inputs, next(i for i in range(STEPS) if any(losses[i] > LIMIT for losses, _, _ in inputs)))


def trained(inputs: Inputs, steps: int) -> list[dict[str, Any]]:
    gradients = torch.stack([torch.stack(mine[:steps]) for _, mine, _ in inputs])
    return [{"steps": steps, "weights": -gradients.mean(0).sum(0)}] * RANKS


EXERCISE = Exercise(
    title="Mend a job that hangs when a loss is bad",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="This training hangs from time to time, always when the log of one rank ends with a bad loss. Mend it: "
    "when the loss of any rank is above the limit, all ranks stop before that step. Return the number of steps done "
    "and the weights, which are minus the sum of the gradients' means over the ranks.",
    reference=case_26,
    stub=stub,
    why="A collective ends only when every rank has called it. A branch that depends on one rank's own data leaves the "
    "others waiting: the decision must be the same everywhere, so it is itself a collective, here the maximum of the "
    "flags, before the step's first one. One number more to reduce costs a latency, a hang costs the job.",
    cause="a rank leaves the loop because of its own loss",
    hints=(
        "Which rank leaves the loop, and what are the others doing at that moment?",
        "Every rank must take the same branch. Which collective tells everyone that anyone's loss is bad?",
        "Before the branch: a tensor with 1.0 where this rank's loss is bad, all_reduce with MAX; branch on the "
        "result.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (lambda inputs: trained(inputs, STEPS), "no rank stopped, although one rank's loss is above the limit"),
            (
                lambda inputs: trained(inputs, in_one_process(inputs)[0]["steps"] + 1),
                "the step with the bad loss was done: decide before its gradients are reduced",
            ),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "all-reduces are all it takes"),),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {
                "float(loss > limit)": "loss",
                "op=dist.ReduceOp.MAX)  # the decision is everyone's\nif bad:": (
                    "op=dist.ReduceOp.SUM)\nif bad / dist.get_world_size() > limit:"
                ),
            },
            "no rank stopped",
            name="on average",
        ),
        mutant(
            {"dist.all_reduce(bad, op=dist.ReduceOp.MAX)": "dist.broadcast(bad, src=0)"},
            "no rank stopped",
            name="rank 0 decides",
        ),
        mutant(
            {
                (
                    "bad = torch.tensor(float(loss > limit))\n"
                    "dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # the decision is everyone's\n"
                    "if bad:\n"
                    "break"
                ): "",
                "steps += 1": (
                    "steps += 1\n"
                    "bad = torch.tensor(float(loss > limit))\n"
                    "dist.all_reduce(bad, op=dist.ReduceOp.MAX)\n"
                    "if bad:\n"
                    "    break"
                ),
            },
            "the step with the bad loss was done",
            name="one step too many",
        ),
        mutant(
            {
                (
                    "bad = torch.tensor(float(loss > limit))\n"
                    "dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # the decision is everyone's\n"
                    "if bad:\n"
                    "break"
                ): ""
            },
            "no rank stopped",
        ),
    ),
    shortcuts=(
        mutant(
            {
                (
                    "bad = torch.tensor(float(loss > limit))\n"
                    "dist.all_reduce(bad, op=dist.ReduceOp.MAX)  # the decision is everyone's\n"
                    "if bad:"
                ): "if loss > limit:",
                "dist.all_reduce(gradient)\nweights -= gradient / dist.get_world_size()": "weights -= gradient",
            },
            "expected",
            name="without the others",
        ),
        Wrong(lambda losses, gradients, limit: {"steps": 3, "weights": torch.zeros(NUMBERS)}, "expected"),
    ),
    covers=("pitfall 4", "pitfall 5", "misconception 35", "coverage 000.32"),
    stub_says="returned without calling",
)
