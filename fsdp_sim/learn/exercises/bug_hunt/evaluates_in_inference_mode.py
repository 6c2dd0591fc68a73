"""A training that fails in its first step, because of an evaluation before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.exercise import Exercise, Kind, Wrong
from fsdp_sim.learn.exercises.bug_hunt import batches, loss_of, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, STEPS, LR = 2, 2, 2.0


def stub(model, rows, validation, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with torch.inference_mode():  # does the evaluation run at all?
        before = model(validation).square().mean().item()
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"before": before, "head": model.head.weight.full_tensor()}


def evaluates_in_inference_mode(model, rows, validation, lr):
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


def evaluates_at_the_end(model, rows, validation, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    head = model.head.weight.full_tensor()
    with torch.inference_mode():
        loss = model(validation).square().mean().item()
    return {"before": loss, "head": head}


def clones_the_output(model, rows, validation, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with torch.inference_mode():
        output = model(validation)
    before = output.clone().square().mean().item()
    for x in rows:
        model(x.clone()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"before": before, "head": model.head.weight.full_tensor()}


def in_training_too(model, rows, validation, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    with torch.inference_mode():
        before = model(validation).square().mean().item()
        for x in rows:
            model(x)
            optimizer.step()
    model.reshard()
    return {"before": before, "head": model.head.weight.full_tensor()}


def not_sharded(model, rows, validation, lr):
    before = model(validation).square().mean().item()
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"before": before, "head": model.head.weight}


def untrained(inputs: Inputs) -> list[dict[str, Any]]:
    head = inputs[0][0].head.weight.data
    return [{"before": loss_of(inputs[0][0], mine).item(), "head": head} for _, _, mine, _ in inputs]


EXERCISE = Exercise(
    title="Mend a training that a look at the loss breaks",
    kind=Kind.FAULT,
    difficulty=2,
    importance=3,
    minutes=10,
    contract="Before the first step the loss on validation rows is looked at, to see that evaluation works. It does, "
    "and then the first training step fails on every rank. Without the look, training runs. Each rank is given the "
    "same model, its training rows for each step and its validation rows. Mend it: return the validation loss before "
    "training, each rank its own, and the head's whole weight after it.",
    reference=evaluates_in_inference_mode,
    stub=stub,
    why="A tensor made under inference_mode can never be part of training, and FSDP makes its buffers for the whole "
    "parameters once, in the first forward, and uses them again and again. So the evaluation decides what kind of "
    "tensors they are. no_grad saves the same activations and leaves no such mark. If training comes first, "
    "inference_mode goes well, which is why the fault is often found by the one who adds a sanity check.",
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
        Wrong(evaluates_at_the_end, "it is the loss after training"),
        Wrong(clones_the_output, "Inplace update to inference tensor"),
        Wrong(in_training_too, "nothing was learned in inference mode"),
    ),
    shortcuts=(
        Wrong(not_sharded, "expected"),
        Wrong(lambda model, rows, validation, lr: {"before": 0.1, "head": model.head.weight}, "expected"),
        Wrong(lambda *_: dist.get_rank(), "a dict is asked for"),
    ),
    covers=("pitfall 25",),
    stub_says="Inplace update to inference tensor",
)
