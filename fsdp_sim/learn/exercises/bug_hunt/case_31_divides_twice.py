"""A training that learns more slowly with every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist  # noqa: F401 - in edits
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import ROWS, batches, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, STEPS, LR = 3, 2, 2.0


stub = Edit(
    {"mean()  # FSDP takes the mean over all ranks": "mean() / dist.get_world_size()  # the mean over all ranks"}
)


def case_31(model, rows, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x in rows:
        loss = model(x).square().mean()  # FSDP takes the mean over all ranks
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.full_tensor() for parameter in model.parameters()]


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model = net(draw)
    return [(model, batches(draw, STEPS), LR) for _ in range(RANKS)]


def after(inputs: Inputs, lr: float = LR) -> list[list[torch.Tensor]]:
    steps = list(zip(*(rows for _, rows, _ in inputs), strict=True))
    return [list(trained(inputs[0][0], steps, lr)[0].values())] * RANKS


EXERCISE = Exercise(
    title="Mend a training that slows down with every rank",
    kind=ExerciseKind.FAULT,
    difficulty=1,
    importance=5,
    minutes=8,
    contract="The same batch, split over more ranks: with one it learns as it should, with every rank more it learns "
    "more slowly, until someone multiplies the learning rate by the number of ranks. Each rank is given the same "
    "model and its own rows, equally many, for each step. Mend it, with the learning rate that it is given, and "
    "return all whole weights, in the order of model.parameters().",
    reference=case_31,
    stub=stub,
    why="FSDP reduces gradients to their mean over the ranks, as DDP does. Who divides the loss too, divides twice. "
    "With plain SGD a larger learning rate hides that; with clipping, weight decay or Adam's epsilon it does not. "
    "What one divides by oneself is what FSDP cannot know: micro-batches, or tokens where ranks have unequally many.",
    cause="the loss is divided by the ranks, and FSDP averages over them as well",
    hints=(
        "By how much is a gradient too small with two ranks, with three? Who divides by that?",
        "A reduce-scatter of FSDP has a reduce op. Look at it in the report of any hang of this notebook: SUM or AVG?",
        "The loss of this rank's rows is what backward is called on. Nothing needs to be divided.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=after,
        causes=(
            (
                lambda inputs: after(inputs, LR / RANKS),
                "gradients are divided by the ranks twice: once by you, once by FSDP's reduce-scatter",
            ),
            (
                lambda inputs: after(inputs, LR * RANKS),
                f"gradients are {RANKS} times too large: a sum over the ranks, not their mean",
            ),
            (lambda inputs: after(inputs, LR * ROWS), "the loss is the sum over this rank's rows, not their mean"),
        ),
        abs_=2e-5,
    ),
    wrong=(
        mutant(
            {"model(x).square().mean()": "RANKS * model(x).square().mean()"}, "a sum over the ranks, not their mean"
        ),
        mutant(
            {
                "optimizer.step()": (
                    "for parameter in model.parameters():\n    parameter.grad /= RANKS\noptimizer.step()"
                )
            },
            "divided by the ranks twice",
        ),
        mutant({"square().mean()": "square().mean(1).sum()"}, "the loss is the sum over this rank's rows"),
    ),
    shortcuts=(
        mutant(
            {
                "for unit in (*model.layers, model):\nfully_shard(unit)": "",
                "[parameter.full_tensor() for parameter in model.parameters()]": "list(model.parameters())",
            },
            "expected",
            name="not sharded",
        ),
        Wrong(lambda model, rows, lr: list(model.parameters()), "expected"),
    ),
    covers=("pitfall 36", "misconception 11"),
    stub_says="gradients are divided by the ranks twice",
)
