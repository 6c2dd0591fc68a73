"""Which units a threshold makes."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.measure.trace_wrap import wrap_names

LAYERS = 12


def size_based_units(model, min_params):
    units = 0

    def left_in(module):
        nonlocal units
        if isinstance(module, int):
            left = module
        elif isinstance(module, list):
            return sum(left_in(child) for child in module)  # a ModuleList is never a unit
        else:
            left = sum(left_in(child) for child in module.values())
        if module is not model and left >= min_params:
            units, left = units + 1, 0
        return left

    return {"root": left_in(model), "units": units}


def wrapped(model: dict[str, Any], min_params: int) -> dict[str, int]:
    """By torch's policy, on a module with these parameters."""
    module = module_of(model)
    names = units_by_size(module, min_params)
    of_units = {param for name in names for param in module.get_submodule(name).parameters()}
    return {"root": sum(p.numel() for p in module.parameters() if p not in of_units), "units": len(names)}


def units_by_size(module: nn.Module, min_params: int) -> list[str]:
    """The names of the units that torch's policy makes."""
    return wrap_names(module, functools.partial(size_based_auto_wrap_policy, min_num_params=min_params))


def module_of(tree: Any) -> nn.Module:
    """A module without storage that is made like the tree."""
    if isinstance(tree, list):
        return nn.ModuleList(map(module_of, tree))
    module = nn.Module()
    if isinstance(tree, int):
        module.weight = nn.Parameter(torch.empty(tree, device="meta"))
    else:
        for name, child in tree.items():
            module.add_module(name, module_of(child))
    return module


def gpt(width: int) -> dict[str, Any]:
    """The parameters of a GPT with that width: a module is a dict, a ModuleList a list, a layer an int."""

    def block() -> dict[str, Any]:
        attention = {"qkv": 3 * width * (width + 1), "proj": width * (width + 1)}
        mlp = {"up": 4 * width * (width + 1), "down": width * (4 * width + 1)}
        return {"norm": 2 * width, "attention": attention, "norm_2": 2 * width, "mlp": mlp}

    return {"embedding": 50_257 * width, "layers": [block() for _ in range(LAYERS)], "norm": 2 * width}


def cases(draw: random.Random) -> list[tuple[dict[str, Any], int]]:
    """Thresholds between a single layer, its neighbours and a block."""
    models = [gpt(64 * draw.randint(6, 20)) for _ in range(4)]
    places = [(0.6, 0.9), (1.2, 2.5), (3.2, 3.9), (13.0, 40.0)]  # in squares of the width
    found = []
    for model, (low, high) in zip(models, places, strict=True):
        width = model["norm"] // 2
        found.append((model, int(draw.uniform(low, high) * width * width)))
    return found


def blocks_whole(model, min_params):
    block = total(model["layers"][0])
    if block < min_params:
        return {"root": total(model) - model["embedding"] * (model["embedding"] >= min_params),
                "units": int(model["embedding"] >= min_params)}  # fmt: skip
    large = model["embedding"] >= min_params
    return {"root": model["norm"] + (0 if large else model["embedding"]), "units": LAYERS + large}


def total(module):
    if isinstance(module, int):
        return module
    return sum(map(total, module if isinstance(module, list) else module.values()))


def parents_too(model, min_params):
    """Every module that is large enough, whatever its children are."""

    def count(module):
        children = [] if isinstance(module, int) else module if isinstance(module, list) else module.values()
        own = not isinstance(module, list) and module is not model and total(module) >= min_params
        return own + sum(map(count, children))

    return {"root": size_based_units(model, min_params)["root"], "units": count(model)}


def layers_alone(model, min_params):
    """Single layers only: what is left in a block goes to the root."""

    def leaves(module):
        if isinstance(module, int):
            return [module]
        return [n for child in (module if isinstance(module, list) else module.values()) for n in leaves(child)]

    numbers = leaves(model)
    return {"root": sum(n for n in numbers if n < min_params), "units": sum(n >= min_params for n in numbers)}


EXERCISE = Exercise(
    title="Predict the units that a threshold makes",
    kind=ExerciseKind.NUMBER,
    difficulty=3,
    importance=3,
    minutes=25,
    contract="torch's size_based_auto_wrap_policy, by hand. A model is a dict of its children: dicts (modules), lists ("
    "ModuleLists) and ints (a layer with so many parameters). Children come first. A module becomes a unit when its "
    "parameters that are in no unit yet are at least min_params; a ModuleList and the model itself never do. Return a "
    "dict: units, how many there are beside the root, and root, the parameters left to the root.",
    reference=size_based_units,
    why="The policy begins with the children, so a threshold of a million, which sounds like 'wrap what is large', "
    "cuts a GPT into single linear layers: they are large enough, and what remains of the block is not. The block is a "
    "unit only if the threshold is above each of its layers and their parents, and below the block. And a small "
    "threshold does not shard more: what is in no unit is in the root, and sharded too.",
    hints=(
        "Which module is looked at first: a block, or the linear layers inside?",
        "Let a function return how many parameters of a module are in no unit yet; a unit returns 0.",
        "For a dict: add up what its children return; if the sum is large enough, count a unit and return 0.",
    ),
    judge=Numbers(
        truth=wrapped,
        source="counted by torch's policy on such a module",
        cases=cases,
        where="with min_params={min_params:,}",
    ),
    wrong=(
        Wrong(blocks_whole, "a block is no unit where its layers are large enough: children come first"),
        Wrong(parents_too, "a parent counts only what is in no unit yet; its children took theirs"),
        Wrong(layers_alone, "what a module's children leave may together be large enough for a unit"),
        mutant({'"units": units': '"units": units + 1'}, "units are counted beside the root", name="root counted"),
    ),
    shortcuts=(Wrong(lambda model, min_params: {"units": LAYERS, "root": model["embedding"]}, "expected"),),
    covers=("coverage 002.14", "coverage 001.17", "coverage 001.48", "misconception 1.2", "misconception 2.12"),
)
