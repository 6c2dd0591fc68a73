"""A training in which nothing is learned."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import batches, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, STEPS, LR = 2, 4, 1.0


stub = Edit(
    {
        "for unit in": "optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)\nfor unit in",
        "optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)  # after: it is to hold the shards": "",
    }
)


def case_30(model, rows, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)  # after: it is to hold the shards
    losses = []
    for x in rows:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model = net(draw)
    return [(model, batches(draw, STEPS), LR) for _ in range(RANKS)]


def losses_of(inputs: Inputs, lr: float = LR, momentum: float = 0.9) -> list[torch.Tensor]:
    steps = list(zip(*(rows for _, rows, _ in inputs), strict=True))
    return [trained(inputs[0][0], steps, lr, momentum)[1]] * RANKS


def mean(losses):
    dist.all_reduce(losses)
    return losses / dist.get_world_size()


def higher_rate(model, rows, lr):
    return stub(model, rows, 10 * lr)


def accumulated(inputs: Inputs) -> list[torch.Tensor]:
    """Without zero_grad."""
    model = copy.deepcopy(inputs[0][0])
    optimizer, losses = torch.optim.SGD(model.parameters(), LR, momentum=0.9), []
    for rows in zip(*(rows for _, rows, _ in inputs), strict=True):
        loss = model(torch.cat(rows)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses)] * RANKS


def blocks_only(inputs: Inputs) -> list[torch.Tensor]:
    steps = list(zip(*(rows for _, rows, _ in inputs), strict=True))
    return [trained(inputs[0][0], steps, LR, 0.9, lambda name: name.startswith("layers."))[1]] * RANKS


EXERCISE = Exercise(
    title="Mend a training that does not learn",
    kind=ExerciseKind.FAULT,
    difficulty=1,
    importance=5,
    minutes=10,
    contract="No error, no hang, every collective in its place, and the loss does not fall, whatever the learning "
    "rate. Each rank is given the same model and its own rows for each step. Mend it: train with SGD with momentum "
    "0.9 and return the loss of each step, the mean over the ranks.",
    reference=case_30,
    stub=stub,
    why="fully_shard puts new parameters, DTensors, in the place of the old ones. An optimizer that was made before "
    "holds the old ones: whole, without gradients, and of no use to the model. SGD and Adam pass over a parameter "
    "without a gradient, and say nothing. So shard first, then make the optimizer. (FSDP1 with use_orig_params=True "
    "is the exception: it keeps the objects.)",
    cause="the optimizer holds the parameters that sharding has replaced",
    hints=(
        "Three things must be the same tensor: what forward uses, what gets gradients, and what the optimizer steps.",
        "Print type(p) for the parameters of the model and for optimizer.param_groups[0]['params'].",
        "model.parameters() gives others after fully_shard than before it. When is the optimizer made?",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=losses_of,
        causes=(
            (lambda inputs: losses_of(inputs, lr=0.0), "no weight has moved: what does the optimizer hold?"),
            (
                lambda inputs: losses_of(inputs, momentum=0.0),
                "the momentum is lost: an optimizer made anew in each step has forgotten the steps before",
            ),
            (
                accumulated,
                "gradients of earlier steps are still there: they are added up when they are not set to None",
            ),
            (blocks_only, "only the blocks learn: the root was sharded after the optimizer was made"),
        ),
    ),
    wrong=(
        Wrong(higher_rate, "no weight has moved"),
        mutant(
            {
                (
                    "optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)  # after: it is to hold "
                    "the shards"
                ): "",
                "for x in rows:": (
                    "for x in rows:\n    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)"
                ),
            },
            "the momentum is lost",
            name="new in every step",
        ),
        mutant({"optimizer.zero_grad()": ""}, "gradients of earlier steps are still there", name="gradients kept"),
        mutant(
            {
                "(*model.layers, model)": "model.layers",
                "momentum=0.9)  # after: it is to hold the shards": "momentum=0.9)\nfully_shard(model)",
            },
            "only the blocks learn",
            name="half before",
        ),
    ),
    shortcuts=(
        mutant({"for unit in (*model.layers, model):\nfully_shard(unit)": ""}, "expected", name="not sharded"),
        Wrong(lambda model, rows, lr: torch.linspace(0.2, 0.1, STEPS), "expected"),
    ),
    covers=("pitfall 11",),
    stub_says="no weight has moved",
)
