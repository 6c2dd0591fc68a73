"""A tied embedding that FSDP1 trains twice, without a word."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, WORDS, WIDTH, STEPS, RATE = 2, 64, 32, 4, 0.5


class Model(nn.Module):
    """Embedding, two blocks, and a head whose weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


stub = Edit({"{nn.Sequential}": "{nn.Embedding, nn.Sequential, nn.Linear}"})


def case_09(model, tokens, targets, train):
    policy = ModuleWrapPolicy({nn.Sequential})
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return train(model, tokens, targets)


def train(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> list[float]:
    """A few steps of SGD on the same tokens; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def inputs(seed: int) -> Inputs:
    torch.manual_seed(seed)
    model = Model()
    nn.init.normal_(model.embed.weight, std=0.2)
    return [(model, *torch.randint(WORDS, (2, 2, 16)).unbind(), train) for _ in range(RANKS)]


def trained(change: Callable[[Model], None] = lambda model: None) -> Callable[[Inputs], list[list[float]]]:
    """What each rank's losses are in one process, where gradients are means over all ranks' tokens."""

    def losses(inputs: Inputs) -> list[list[float]]:
        model = copy.deepcopy(inputs[0][0])
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        found: list[list[float]] = [[] for _ in inputs]
        for _ in range(STEPS):
            optimizer.zero_grad()
            for rank, (_, tokens, targets, _) in enumerate(inputs):
                loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
                (loss / RANKS).backward()
                found[rank].append(loss.item())
            optimizer.step()
        return found

    return losses


def untie(model: Model) -> None:
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def not_wrapped(model, tokens, targets, train):
    return train(model, tokens, targets)


EXERCISE = Exercise(
    title="Mend a tied embedding that trains twice",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="model.head.weight is model.embed.weight: one tensor with two names. Wrapped like this with FSDP1 the "
    "first loss is right, no error is raised, and from the second step on the losses are not those of one process. "
    "Mend the wrapping. Each block (nn.Sequential) stays a unit; return what train returns.",
    reference=case_09,
    stub=stub,
    why="FSDP1 flattens each unit into one tensor. The embedding is copied into its unit's and the head into another, "
    "so from here on there are two tensors, each with half of the gradient. A parameter belongs to one unit: leave "
    "both modules to the root, which is around both. fully_shard of torch 2.13 refuses the wrapping above with a "
    "ValueError; FSDP1 trains.",
    cause="one parameter went into two units and is two parameters since",
    hints=(
        "How many units have the tied tensor? What does FSDP1 make of each unit's parameters?",
        "Both names must end in the same unit. Which unit is around the embedding and around the head?",
        "Name in the policy only the class of the blocks; what it does not name is left to the root.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=trained(),
        causes=((trained(untie), "embedding and head are two tensors now, in two units, and each trains alone"),),
        rel=1e-4,
        abs_=1e-4,
    ),
    wrong=(
        Wrong(stub, "embedding and head are two tensors now"),
        mutant(
            {"{nn.Sequential}": "{nn.Sequential, nn.Linear}"},
            "embedding and head are two tensors now",
            name="without the embedding",
        ),
        mutant(
            {"policy =": "model.head.weight = nn.Parameter(model.head.weight.detach().clone())\npolicy ="},
            "embedding and head are two tensors now",
            name="untied",
        ),
        Wrong(not_wrapped, "place 2: expected"),
    ),
    shortcuts=(
        Wrong(lambda model, tokens, targets, train: [4.0] * STEPS, "expected"),
        Wrong(lambda model, tokens, targets, train: train(model, tokens, targets)[:1] * STEPS, "expected"),
    ),
    covers=("pitfall 16", "coverage 004.124", "misconception 1.3"),
    stub_says="embedding and head are two tensors now",
)
