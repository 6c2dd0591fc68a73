"""FSDP1 is deprecated: does torch say so when it is used?"""

from __future__ import annotations

import copy
import functools
import random
import warnings
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.migration.ddp_step_to_fsdp2 import RANKS, transformer
from fsdp_sim.learn.judges import Inputs, OnRanks

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
STATEMENT = "FSDP1 is deprecated, so torch warns whoever wraps a model in it"


def warned_of_fsdp1(model, strategies):
    warned = 0
    for strategy in strategies:
        chosen, cpu = ShardingStrategy[strategy], torch.device("cpu")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FullyShardedDataParallel(copy.deepcopy(model), sharding_strategy=chosen, device_id=cpu)
        warned += any(issubclass(warning.category, FutureWarning) for warning in caught)
    return warned == len(strategies), warned


def inputs(seed: int) -> Inputs:
    draw = random.Random(seed)
    strategies = [*STRATEGIES, *draw.choices(STRATEGIES, k=draw.randint(1, 6)), "NO_SHARD"]
    draw.shuffle(strategies)
    return [(transformer(seed)[:2], strategies)] * RANKS


@functools.cache
def warning_strategies() -> frozenset[str]:
    """The strategies at which torch warns, tried on ranks."""
    from fsdp_sim.ranks import run

    def tried() -> list[str]:
        return [strategy for strategy in STRATEGIES if warned_of_fsdp1(transformer(0)[:2], [strategy])[1]]

    return frozenset(run(tried, RANKS, progress=False, show_output=False)[0])


def settled(inputs: Inputs) -> list[list[Any]]:
    """Whether the statement holds, and how many of the wraps warn."""
    return [[False, sum(strategy in warning_strategies() for strategy in strategies)] for _, strategies in inputs]


def once(model, strategies):
    return False, len({strategy for strategy in strategies if strategy == "NO_SHARD"})


EXERCISE = Exercise(
    title="Settle whether torch warns of FSDP1",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=3,
    minutes=10,
    contract=f'"{STATEMENT}." On each of 2 ranks you are given a small model and a list of names of strategies '
    "(of ShardingStrategy). Wrap a copy of the model in FullyShardedDataParallel with each of them and count the wraps "
    "at which torch emits a FutureWarning. Return (whether the statement is True or False, the count).",
    reference=warned_of_fsdp1,
    why="False. torch 2.13 warns at NO_SHARD alone, and elsewhere at state_dict_type; FullyShardedDataParallel itself "
    "says nothing. Yet torch's own tutorial calls FSDP1 deprecated and teaches fully_shard. So the absence of a "
    "warning is no reason to begin with it: what is new, and the other parallelisms, go to FSDP2.",
    hints=(
        "A FutureWarning is for users, a DeprecationWarning for developers. How does one catch warnings as a list?",
        "warnings.catch_warnings(record=True) gives the list; the filter inside it decides what gets there. On CPU "
        "ranks the wrap needs a device_id.",
        "For each strategy: catch_warnings, simplefilter('always'), wrap a deepcopy with device_id a CPU device, "
        "then look for a FutureWarning among the caught.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=settled,
        causes=(
            (lambda inputs: [[False, 0]] * RANKS, "nothing was caught: inside catch_warnings the filter still hides"),
            (lambda inputs: [[False, 1]] * RANKS, "Python shows a warning once per line of code; ask for 'always'"),
            (
                lambda inputs: [[True, count] for _, count in settled(inputs)],
                "the count is right, and it is not the number of wraps: so the statement is False",
            ),
        ),
    ),
    wrong=(
        mutant(
            {
                'warnings.simplefilter("always")': "",
                "any(issubclass(warning.category, FutureWarning) for warning in caught)": "bool(caught)",
            },
            "nothing was caught",
            name="filter left",
        ),
        Wrong(once, "once per line of code"),
        mutant({"warned == len(strategies)": "True"}, "so the statement is False", name="other conclusion"),
        mutant({", device_id=cpu": ""}, "FSDP needs a non-CPU accelerator device", name="wrapped without device"),
    ),
    shortcuts=(
        Wrong(lambda model, strategies: (True, len(strategies)), "expected False"),
        Wrong(lambda model, strategies: (False, 12), "place 2: expected"),
    ),
    covers=("misconception 34", "misconception 4.104", "misconception 2.9", "coverage 002.11"),
)
