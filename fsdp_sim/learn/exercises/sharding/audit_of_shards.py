"""Verify that a model is sharded: what is kept where, and what was forgotten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS = 2


def audit_of_shards(make):
    parameters, kept, whole = 0, 0, []
    for name, parameter in make().named_parameters():
        sharded = isinstance(parameter, DTensor)
        local = parameter.to_local() if sharded else parameter
        parameters += parameter.numel()
        kept += local.numel()
        if not sharded:
            whole.append(name)
    return {"parameters": parameters, "kept here": kept, "not sharded": whole}


@dataclass(frozen=True)
class PartlySharded:
    """Makes a few Linear layers and shards each but the ones that it forgets."""

    sizes: tuple[tuple[int, int], ...]
    forgotten: tuple[int, ...]

    def __call__(self) -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(columns, rows) for rows, columns in self.sizes))
        for number, layer in enumerate(model):
            if number not in self.forgotten:
                fully_shard(layer)
        return model


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    sizes = tuple((int(rows), int(columns)) for rows, columns in torch.randint(5, 60, (6, 2), generator=draw))
    forgotten = tuple(sorted(torch.randperm(6, generator=draw)[:2].tolist()))
    return [(PartlySharded(sizes, forgotten),)] * RANKS


def by_shapes(inputs: Inputs) -> list[dict[str, Any]]:
    make = inputs[0][0]
    found: list[dict[str, Any]] = [{"parameters": 0, "kept here": 0, "not sharded": []} for _ in range(RANKS)]
    for number, (rows, columns) in enumerate(make.sizes):
        pieces = [len(piece) for piece in torch.empty(rows, 0).chunk(RANKS)]
        for rank, of_rank in enumerate(found):
            whole = number in make.forgotten
            kept = rows if whole else pieces[rank] if rank < len(pieces) else 0
            of_rank["parameters"] += rows * (columns + 1)
            of_rank["kept here"] += kept * (columns + 1)
            of_rank["not sharded"] += [f"{number}.weight", f"{number}.bias"] * whole
    return found


def numel_of_the_whole(inputs: Inputs) -> list[dict[str, Any]]:
    return [found | {"kept here": found["parameters"]} for found in by_shapes(inputs)]


def without_the_forgotten(inputs: Inputs) -> list[dict[str, Any]]:
    make = inputs[0][0]
    whole = sum(rows * (columns + 1) for number, (rows, columns) in enumerate(make.sizes) if number in make.forgotten)
    return [found | {"kept here": found["kept here"] - whole} for found in by_shapes(inputs)]


def attribute_that_is_not_there(inputs: Inputs) -> list[dict[str, Any]]:
    names = [f"{number}.{what}" for number in range(len(inputs[0][0].sizes)) for what in ("weight", "bias")]
    return [found | {"not sharded": names} for found in by_shapes(inputs)]


EXERCISE = Exercise(
    title="Audit a model that is said to be sharded",
    kind=ExerciseKind.CODE,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="make() makes a model and shards it with fully_shard, or so it says: some layers were forgotten. Call it "
    "once on each of 2 ranks and return a dict: 'parameters', how many numbers the whole model has; 'kept here', how "
    "many of them this rank holds; 'not sharded', the names of the parameters that this rank holds whole by mistake, "
    "in order.",
    reference=audit_of_shards,
    why="A sharded parameter is a DTensor; nothing else about it is worth asking. Its numel() and shape are those of "
    "the whole, so counts of parameters are right on any rank, and so is every formula that uses them; what is here is "
    "to_local(). FSDP1 is the other way round: numel() is the shard's, and one has to count before wrapping. What was "
    "forgotten stays a plain tensor: no error, whole on every rank, and its gradients are never reduced.",
    hints=(
        "What type does fully_shard give a parameter? What do numel() and to_local() of it say?",
        "Go through named_parameters(): a DTensor is sharded; a plain tensor is here as a whole.",
        "isinstance(parameter, DTensor); numel() for the whole, to_local().numel() for what is here.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=by_shapes,
        causes=(
            (numel_of_the_whole, "a DTensor's numel() is that of the whole; to_local() is what is here"),
            (without_the_forgotten, "what was forgotten is here too, whole: it counts among what this rank holds"),
            (attribute_that_is_not_there, "parameters have no attribute _sharded; a sharded one is a DTensor"),
        ),
    ),
    wrong=(
        mutant({"local.numel()": "parameter.numel()"}, "a DTensor's numel() is that of the whole", name="counts numel"),
        mutant(
            {"if not sharded:": 'if not getattr(parameter, "_sharded", False):'},
            "parameters have no attribute _sharded",
            name="asks for sharded",
        ),
        mutant(
            {"kept += local.numel()": "kept += local.numel() * sharded"},
            "what was forgotten is here too, whole",
            name="leaves out the forgotten",
        ),
        mutant({'"kept here": kept': '"kept here": parameters // RANKS'}, "kept here: expected", name="divides"),
        mutant(
            {"parameters += parameter.numel()": "parameters += local.numel()"},
            "parameters: expected",
            name="adds up what is here",
        ),
    ),
    shortcuts=(
        Wrong(lambda make: {"parameters": 10_000, "kept here": 2_500, "not sharded": []}, "expected"),
        Wrong(lambda make: {"parameters": 0, "kept here": 0, "not sharded": []}, "expected"),
    ),
    covers=("pitfall 35", "coverage 004.76", "coverage 004.95", "coverage 001.40"),
)
