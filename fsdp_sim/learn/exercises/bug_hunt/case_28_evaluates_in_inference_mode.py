"""A training that fails in its first step, because of an evaluation before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import batches, loss_of, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, STEPS, LR = 2, 2, 2.0


stub = Edit(
    {
        "torch.no_grad():  # buffers made in it can be used in training too": (
            "torch.inference_mode():  # does the evaluation run at all?"
        )
    }
)


def case_28(model, rows, validation, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with torch.no_grad():  # buffers made in it can be used in training too
        before = model(validation).square().mean().item()
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"before": before, "head": model.head.weight.full_tensor()}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model = net(draw)
    return [(model, batches(draw, STEPS), batches(draw, 1)[0], LR) for _ in range(RANKS)]


def evaluated(inputs: Inputs, after_training: bool) -> list[dict[str, Any]]:
    weights, _, models = trained(inputs[0][0], list(zip(*(rows for _, rows, _, _ in inputs), strict=True)), LR)
    model = models[-1] if after_training else inputs[0][0]
    return [{"before": loss_of(model, mine).item(), "head": weights["head.weight"]} for _, _, mine, _ in inputs]


def in_one_process(inputs: Inputs) -> list[dict[str, Any]]:
    return evaluated(inputs, after_training=False)


def untrained(inputs: Inputs) -> list[dict[str, Any]]:
    head = inputs[0][0].head.weight.data
    return [{"before": loss_of(inputs[0][0], mine).item(), "head": head} for _, _, mine, _ in inputs]


EXERCISE = Exercise(
    title="Mend a training that a look at the loss breaks",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=3,
    minutes=10,
    contract="Before the first step the loss on validation rows is looked at, to see that evaluation works. It does, "
    "and then the first training step fails on every rank. Without the look, training runs. Each rank is given the "
    "same model, its training rows for each step and its validation rows. Mend it: return the validation loss before "
    "training, each rank its own, and the head's whole weight after it.",
    reference=case_28,
    stub=stub,
    why="A tensor made under inference_mode can never be part of training, and FSDP makes its buffers for the whole "
    "parameters once, in the first forward, and uses them again and again. So the evaluation decides what kind of "
    "tensors they are. no_grad saves the same activations and leaves no such mark. If training comes first, "
    "inference_mode goes well, which is why the fault is often found by the one who adds a sanity check.",
    cause="the first forward, in which FSDP makes its buffers, runs under inference_mode",
    hints=(
        "Read the error to its end: which tensors are different since the evaluation? Who made them, and when?",
        "FSDP makes the storage of whole parameters in the first forward there is, and keeps it for later ones.",
        "There is a second way to tell torch that no gradients are wanted, which marks no tensor.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (lambda inputs: evaluated(inputs, after_training=True), "it is the loss after training, not before it"),
            (untrained, "the weights are those before training: nothing was learned in inference mode"),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {
                (
                    "with torch.no_grad():  # buffers made in it can be used in training too\n"
                    "before = model(validation).square().mean().item()"
                ): "",
                'return {"before": before, "head": model.head.weight.full_tensor()}': (
                    "head = model.head.weight.full_tensor()\n"
                    "with torch.inference_mode():\n"
                    "    before = model(validation).square().mean().item()\n"
                    'return {"before": before, "head": head}'
                ),
            },
            "it is the loss after training",
            name="evaluates at the end",
        ),
        mutant(
            {
                (
                    "with torch.no_grad():  # buffers made in it can be used in training too\n"
                    "before = model(validation).square().mean().item()"
                ): (
                    "with torch.inference_mode():\n"
                    "    output = model(validation)\n"
                    "before = output.clone().square().mean().item()"
                ),
                "model(x)": "model(x.clone())",
            },
            "Inplace update to inference tensor",
            name="clones the output",
        ),
        mutant(
            {
                "torch.no_grad():  # buffers made in it can be used in training too": "torch.inference_mode():",
                "for x in rows:\nmodel(x).square().mean().backward()\noptimizer.step()\noptimizer.zero_grad()": (
                    "    for x in rows:\n        model(x)\n        optimizer.step()\nmodel.reshard()"
                ),
            },
            "nothing was learned in inference mode",
            name="in training too",
        ),
    ),
    shortcuts=(
        mutant(
            {"for unit in (*model.layers, model):\nfully_shard(unit)": "", ".full_tensor()": ""},
            "expected",
            name="not sharded",
        ),
        Wrong(lambda model, rows, validation, lr: {"before": 0.1, "head": model.head.weight}, "expected"),
        Wrong(lambda *_: dist.get_rank(), "a dict is asked for"),
    ),
    covers=("pitfall 25",),
    stub_says="Inplace update to inference tensor",
)
