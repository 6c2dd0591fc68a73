"""A training in which embedding and head do not learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor  # noqa: F401 - in edits

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import batches, loss_of, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, STEPS, LR = 2, 2, 2.0


stub = Edit(
    {
        (
            "optimizer = torch.optim.SGD(model.parameters(), lr)  # right after sharding, while all are "
            "DTensors\n"
            "first = model(rows[0]).square().mean().item()"
        ): (
            "first = model(rows[0]).square().mean().item()  # for the log\n"
            "optimizer = torch.optim.SGD(model.parameters(), lr)"
        )
    }
)


def case_32(model, rows, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)  # right after sharding, while all are DTensors
    first = model(rows[0]).square().mean().item()
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"first": first, "weights": [p.full_tensor() for p in model.parameters()]}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model = net(draw)
    return [(model, batches(draw, STEPS), LR) for _ in range(RANKS)]


def after(inputs: Inputs, which: Callable[[str], bool] = lambda name: True) -> list[dict[str, Any]]:
    steps = list(zip(*(rows for _, rows, _ in inputs), strict=True))
    weights = list(trained(inputs[0][0], steps, LR, which=which)[0].values())
    return [{"first": loss_of(model, rows[0]).item(), "weights": weights} for model, rows, _ in inputs]


def is_a_block(name: str) -> bool:
    return name.startswith("layers.")


def with_the_first_twice(inputs: Inputs) -> list[dict[str, Any]]:
    """As if the forward for the log had been a step."""
    return after([(model, [rows[0], *rows], lr) for model, rows, lr in inputs])


EXERCISE = Exercise(
    title="Mend a training in which the root stands still",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=4,
    minutes=15,
    contract="The loss falls, more slowly than with one process. Someone has compared the weights: those of the "
    "blocks change, embedding and head are as they were. Since a line for the log was added it is so. Each rank is "
    "given the same model and its own rows for each step. Mend it: return the loss of its first rows before training, "
    "and all whole weights after it, in the order of model.parameters().",
    reference=case_32,
    stub=stub,
    why="By default the root is not resharded after forward, as its backward comes next. If no backward comes, its "
    "parameters stay whole: model.parameters() gives plain tensors for embedding and head, and the optimizer takes "
    "these. Gradients arrive in the DTensors that come back later. So make the optimizer right after fully_shard, or "
    "call model.reshard() after a forward without a backward. An assert that all of them are DTensors costs a line.",
    cause="the optimizer was made while the root's parameters were unsharded",
    hints=(
        "What is different about the unit that does not learn? What does it look like after a forward?",
        "The root keeps its whole parameters after forward. What does model.parameters() give at that moment?",
        "Make the optimizer while every parameter is a DTensor, or make them so again with model.reshard().",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=after,
        causes=(
            (
                lambda inputs: after(inputs, is_a_block),
                "embedding and head, the root's, are as they were: the optimizer does not hold what gets the gradients",
            ),
            (with_the_first_twice, "the loss for the log was a training step: the first rows were trained on twice"),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {
                (
                    "optimizer = torch.optim.SGD(model.parameters(), lr)  # right after sharding, while all are "
                    "DTensors\n"
                    "first = model(rows[0]).square().mean().item()"
                ): (
                    "with torch.no_grad():\n"
                    "    first = model(rows[0]).square().mean().item()\n"
                    "optimizer = torch.optim.SGD(model.parameters(), lr)"
                )
            },
            "embedding and head, the root's, are as they were",
            name="without gradients",
        ),
        mutant(
            {
                (
                    "optimizer = torch.optim.SGD(model.parameters(), lr)  # right after sharding, while all are "
                    "DTensors\n"
                    "first = model(rows[0]).square().mean().item()"
                ): (
                    "first = model(rows[0]).square().mean().item()\n"
                    "optimizer = torch.optim.SGD([p for p in model.parameters() if isinstance(p, DTensor)], lr)"
                )
            },
            "embedding and head, the root's, are as they were",
            name="blocks alone",
        ),
        mutant(
            {
                (
                    "optimizer = torch.optim.SGD(model.parameters(), lr)  # right after sharding, while all are "
                    "DTensors\n"
                    "first = model(rows[0]).square().mean().item()"
                ): (
                    "first = model(rows[0]).square().mean()\n"
                    "first.backward()\n"
                    "optimizer = torch.optim.SGD(model.parameters(), lr)\n"
                    "optimizer.step()\n"
                    "optimizer.zero_grad()"
                ),
                '"first": first': '"first": first.item()',
            },
            "the first rows were trained on twice",
            name="a step for the log",
        ),
    ),
    shortcuts=(
        mutant(
            {
                "for unit in (*model.layers, model):\nfully_shard(unit)": "",
                "[p.full_tensor() for p in model.parameters()]": "list(model.parameters())",
            },
            "expected",
            name="not sharded",
        ),
        Wrong(lambda model, rows, lr: {"first": 0.1, "weights": list(model.parameters())}, "expected"),
    ),
    covers=("pitfall 12",),
    stub_says="embedding and head, the root's, are as they were",
)
