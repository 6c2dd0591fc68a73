"""A classifier outside of FSDP, which each rank trains alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, WIDTH, CLASSES, STEPS, RATE = 2, 48, 8, 3, 0.5


class Model(nn.Module):
    """An encoder and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.encoder(x))


stub = Edit({"fully_shard(model)": ""})


def case_08(model, x, targets, train):
    fully_shard(model.encoder)
    fully_shard(model)
    return train(model, x, targets)


def train(model: Model, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A few steps of SGD; the whole weight of the classifier."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        cross_entropy(model(x), targets).backward()
        optimizer.step()
    weight = model.classifier.weight.detach()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def inputs(seed: int) -> Inputs:
    torch.manual_seed(seed)
    model = Model()
    return [(model, torch.randn(6, WIDTH), torch.randint(CLASSES, (6,)), train) for _ in range(RANKS)]


def trained(scale: Callable[[int, str], float]) -> Callable[[Inputs], list[torch.Tensor]]:
    """The classifier's weight as each rank would have it, if a gradient counted ``scale`` times a rank's own one.

    Args:
        scale: of the gradients of the parameter of that name: by how much that of another rank (0), and one's own (1).
    """

    def weights(inputs: Inputs) -> list[torch.Tensor]:
        models = [copy.deepcopy(model) for model, *_ in inputs]
        for _ in range(STEPS):
            for model, (_, x, targets, _) in zip(models, inputs, strict=True):
                model.zero_grad()
                cross_entropy(model(x), targets).backward()
            grads = [{name: p.grad for name, p in model.named_parameters()} for model in models]
            for rank, model in enumerate(models):
                for name, param in model.named_parameters():
                    parts = [scale(int(other == rank), name) * grads[other][name] for other in range(RANKS)]
                    param.data -= RATE * torch.stack(parts).sum(0)
        return [model.classifier.weight.detach() for model in models]

    return weights


in_one_process = trained(lambda own, name: 1 / RANKS)
alone = trained(lambda own, name: float(own) if name.startswith("classifier") else 1 / RANKS)
all_alone = trained(lambda own, name: float(own))


def nothing_sharded(model, x, targets, train):
    return train(model, x, targets)


EXERCISE = Exercise(
    title="Mend a classifier that each rank trains alone",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="A guide wraps the encoder and leaves the small classifier as it is. No error, the loss falls, and after "
    "three steps the ranks have different classifiers. Mend the sharding, so that every rank has the weight that one "
    "process with the whole batch would have. Return what train returns.",
    reference=case_08,
    stub=stub,
    why="FSDP reduces the gradients of the parameters that it manages, and no others. Left outside, the classifier is "
    "an ordinary module on every rank: each trains it on its own rows, and nobody averages. The last call must be on "
    "the whole model: the root takes all that no unit inside has, however small.",
    cause="one layer is in no unit, so nobody reduces its gradients",
    hints=(
        "Whose gradients does FSDP reduce? Is the classifier's weight a DTensor?",
        "Every parameter that trains must be managed by some call of fully_shard. Which call takes what is left over?",
        "One line more: the same call as for the encoder, on the model itself, after it.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                alone,
                "nobody reduces the classifier's gradients: it is outside of every unit, and each rank trains it "
                "on its own rows",
            ),
            (all_alone, "nothing is reduced: each rank trains a model of its own"),
        ),
        checks=(OnlyCollectives(frozenset({"all_gather", "reduce_scatter"}), "FSDP needs nothing else"),),
        abs_=1e-4,
    ),
    wrong=(
        Wrong(stub, "nobody reduces the classifier's gradients"),
        mutant(
            {"fully_shard(model)": "fully_shard(model, ignored_params=set(model.classifier.parameters()))"},
            "nobody reduces the classifier's gradients",
            name="ignored",
        ),
        Wrong(nothing_sharded, "nothing is reduced"),
        mutant(
            {"model.encoder)\nfully_shard(model)": "model.classifier)"},
            "2 of 2 ranks are wrong",
            name="classifier only",
        ),
    ),
    shortcuts=(
        Wrong(lambda model, x, targets, train: model.classifier.weight.detach().clone(), "numbers differ"),
        Wrong(lambda model, x, targets, train: torch.zeros(CLASSES, WIDTH), "all of it is zero"),
    ),
    covers=("coverage 004.66", "misconception 4.76"),
    stub_says="nobody reduces the classifier's gradients",
)
