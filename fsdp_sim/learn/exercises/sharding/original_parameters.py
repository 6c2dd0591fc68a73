"""use_orig_params=True gives back normal parameters: true or false?"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS = 4


def original_parameters(make):
    model = FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu"))
    shapes = [list(p.shape) for p in model.parameters()]
    return {"normal": all(len(shape) == 2 for shape in shapes), "shapes": shapes}


@dataclass(frozen=True)
class Layers:
    """Makes a few Linear layers without bias, of these widths."""

    widths: tuple[int, ...]

    def __call__(self) -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(self.widths)))


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    widths = tuple(8 * int(width) for width in torch.randint(2, 12, (5,), generator=draw))
    return [(Layers(widths),)] * RANKS


def flat_cut(inputs: Inputs) -> list[dict[str, Any]]:
    """All parameters end to end, cut into equal chunks: what of each parameter falls into a rank's chunk."""
    widths = inputs[0][0].widths
    numels = [a * b for a, b in itertools.pairwise(widths)]
    chunk, found = -(-sum(numels) // RANKS), []
    for rank in range(RANKS):
        first, shapes = 0, []
        for numel in numels:
            inside = min(first + numel, (rank + 1) * chunk) - max(first, rank * chunk)
            shapes.append([max(0, inside)])
            first += numel
        found.append({"normal": False, "shapes": shapes})
    return found


def whole_shapes(inputs: Inputs) -> list[dict[str, Any]]:
    widths = inputs[0][0].widths
    return [{"normal": True, "shapes": [[b, a] for a, b in itertools.pairwise(widths)]}] * RANKS


def as_fsdp2(make):
    from torch.distributed.fsdp import fully_shard

    model = make()
    fully_shard(model)
    shapes = [list(p.to_local().shape) for p in model.parameters()]
    return {"normal": True, "shapes": shapes}


def also(**changed: Any) -> Callable[[Inputs], list[dict[str, Any]]]:
    return lambda inputs: [found | changed for found in flat_cut(inputs)]


EXERCISE = Exercise(
    title="Settle what use_orig_params gives back",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=3,
    minutes=15,
    contract='"With use_orig_params=True, FSDP1 gives back normal parameters." Given make(), which makes a few Linear '
    "layers without bias: on 4 ranks, wrap the model in FullyShardedDataParallel with use_orig_params=True (and "
    "device_id=torch.device('cpu'), which it needs here), and list the shapes of its parameters on this rank, in "
    "order. Return a dict: 'normal', True if every weight still has two dimensions, and 'shapes', a list of lists.",
    reference=original_parameters,
    why="The names are back, the parameters are not: what a rank sees of a weight is the stretch of it that falls into "
    "its chunk of the flat parameter, one-dimensional, often empty, seldom whole rows. So every rule that looks at "
    "shapes goes wrong in silence. nanoGPT decays weights with p.dim() >= 2 and spares the rest: under FSDP1 it decays "
    "nothing. FSDP2's parameters are DTensors with the shape of the whole, so there the rule holds.",
    hints=(
        "FSDP1 lays all weights of a unit end to end and cuts the line into equal chunks. What of each is in yours?",
        "model.parameters() after wrapping: look at p.shape on every rank, not only on rank 0.",
        "Wrap make(), collect list(p.shape) for each parameter, and ask whether all have length 2.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=flat_cut,
        causes=(
            (whole_shapes, "these are the shapes before wrapping"),
            (also(normal=True), "the shapes are right, and they have one dimension"),
        ),
    ),
    wrong=(
        mutant(
            {'FullyShardedDataParallel(make(), use_orig_params=True, device_id=torch.device("cpu"))': "make()"},
            "these are the shapes before wrapping",
            name="before wrapping",
        ),
        mutant({"use_orig_params=True": "use_orig_params=False"}, "values are asked for, not 1", name="one flat"),
        Wrong(as_fsdp2, "normal: expected False"),
        mutant(
            {"model.parameters()": "model.parameters() if p.numel()"},
            "4 values are asked for",
            name="without the empty",
        ),
        mutant(
            {"all(len(shape) == 2 for shape in shapes)": "True"},
            "the shapes are right, and they have one dimension",
            name="other conclusion",
        ),
    ),
    shortcuts=(Wrong(lambda make: {"normal": False, "shapes": [[64]] * 4}, "expected"),),
    covers=("misconception 28", "coverage 004.90"),
)
