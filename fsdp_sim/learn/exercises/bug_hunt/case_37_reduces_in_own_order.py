"""Gradients that are wrong only on several ranks, without a hang."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import Tensors
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS = 3, 20_000
NAMES = ("query", "key", "value", "output")


stub = Edit({"sorted(gradients):  # the same order on every rank": "gradients:"})


def case_37(gradients):
    for name in sorted(gradients):  # the same order on every rank
        dist.all_reduce(gradients[name])
        gradients[name] /= dist.get_world_size()
    return gradients


def inputs(seed: int) -> Inputs:
    """Each rank has the names in another order: the same one, shifted."""
    draw = torch.Generator().manual_seed(seed)
    calls = []
    for rank in range(RANKS):
        names = NAMES[rank + 1 :] + NAMES[: rank + 1]
        calls.append(({name: torch.randn(NUMBERS, generator=draw) for name in names},))
    return calls


def in_one_process(inputs: Inputs) -> list[Tensors]:
    return [{name: torch.stack([of[name] for (of,) in inputs]).mean(0) for name in NAMES}] * RANKS


def mixed_up(inputs: Inputs, order: Callable[[Tensors], list[str]] = list) -> list[Tensors]:
    """What comes of reducing in another order on each rank."""
    orders = [order(gradients) for (gradients,) in inputs]
    found: list[Tensors] = [{} for _ in inputs]
    for names in zip(*orders, strict=True):
        mean = torch.stack([of[name] for (of,), name in zip(inputs, names, strict=True)]).mean(0)
        for mine, name in zip(found, names, strict=True):
            mine[name] = mean
    return found


def largest_first(gradients):
    return sorted(gradients, key=lambda name: -gradients[name].norm())


def as_one(gradients):
    whole = torch.cat(list(gradients.values()))
    dist.all_reduce(whole)
    parts = whole.chunk(len(gradients))
    return {name: part / dist.get_world_size() for name, part in zip(gradients, parts, strict=True)}


EXERCISE = Exercise(
    title="Mend gradients that are wrong without an error",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="With one rank the gradients are right. With several the training diverges, and no collective hangs or "
    "complains. Each rank is given a dict of gradients by name, all of one size, in the order in which its backward "
    "happened to finish them. Mend it: return on every rank the means over the ranks, by name, with all-reduces.",
    reference=case_37,
    stub=stub,
    why="A collective has no name on the wire: the first of this rank meets the first of every other. Of the same "
    "kind and size they are added up, be they query and key. Sizes that differ would have hung or failed, and that "
    "would have been better. So the order must not depend on a set, a hash, the time of arrival or a rank's data. "
    "FSDP has it from the modules' forward, which is the same on every rank as long as its control flow is.",
    cause="ranks reduce their gradients in different orders",
    hints=(
        "How does rank 1 know that what rank 0 has sent is the gradient of the key?",
        "Print the names on each rank, in the order of the loop. What is added to what?",
        "All ranks need one order that none of them has chosen alone: that of the sorted names.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (mixed_up, "gradients of different parameters were added up: each rank went through them in its own order"),
            (
                lambda inputs: mixed_up(inputs, largest_first),
                "the order depends on each rank's own numbers, so each rank has another one",
            ),
            (
                lambda inputs: [{name: RANKS * mean for name, mean in of.items()} for of in in_one_process(inputs)],
                "these are sums over the ranks, not their means",
            ),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "all-reduces are all it takes"),),
    ),
    wrong=(
        Wrong(as_one, "gradients of different parameters were added up"),
        mutant(
            {"sorted(gradients):  # the same order on every rank": "gradients:\n    dist.barrier()"},
            "gradients of different parameters were added up",
            name="with barriers",
        ),
        mutant(
            {"sorted(gradients)": "sorted(gradients, key=lambda name: -gradients[name].norm())"},
            "the order depends on each rank's own numbers",
            name="largest first",
        ),
        mutant({"gradients[name] /= dist.get_world_size()": ""}, "sums over the ranks, not their means", name="summed"),
    ),
    shortcuts=(
        Wrong(lambda gradients: gradients, "expected"),
        Wrong(lambda gradients: {name: torch.zeros(NUMBERS) for name in gradients}, "expected"),
    ),
    covers=("pitfall 4", "pitfall 8"),
    stub_says="gradients of different parameters were added up",
)
