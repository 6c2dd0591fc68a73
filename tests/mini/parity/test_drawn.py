"""Trainings drawn at random: the mini does to the last bit what torch's `fully_shard` does.

A case is a seed and a number of ranks, of which `drawn` makes modules, plan and calls. ``FSDP_SIM_DRAWN=1000``
tries as many of each instead of the few here; a failure names the seed, which stays the same case:
``FSDP_SIM_DRAWN_SEED=17 pytest tests/mini/parity/test_drawn.py``.
"""

import os
import traceback

import pytest

import fsdp_sim.mini as of_mini
from tests.mini.parity import of_torch
from tests.mini.parity.drawn import difference, train

FEW, MANY = 12, int(os.environ.get("FSDP_SIM_DRAWN", "12"))
AT_ONCE = 2


def compare(seeds):
    """By seed what is not the same, on this rank. Both raise the same exception, or neither does."""
    found = {}
    for seed in seeds:
        seen = []
        for impl in (of_torch, of_mini):
            try:
                seen.append(train(impl, seed))
            except Exception as error:
                seen.append([("raised", type(error).__name__)])
                found[f"{seed}, {impl.__name__}"] = traceback.format_exc()
        if seen[0][0][0] == seen[1][0][0] == "raised" and seen[0] == seen[1]:
            found = {key: text for key, text in found.items() if not key.startswith(f"{seed},")}
        elif said := difference(*seen):
            found[str(seed)] = f"{dict(seen[0]).get('drawn')}: {said}"
    return found


def check(ranks, world_size, seeds):
    for begin in range(0, len(seeds), AT_ONCE):
        for found in ranks(world_size, compare, seeds[begin : begin + AT_ONCE]):
            assert not found, "\n\n".join(f"seed {seed} on {world_size} ranks: {said}" for seed, said in found.items())


def seeds(numbers):
    chosen = os.environ.get("FSDP_SIM_DRAWN_SEED")
    return list(numbers) if chosen is None else [int(chosen)]


@pytest.mark.filterwarnings("ignore:.*returned a view")
def test_a_training_drawn_at_random_is_that_of_torch(ranks):
    check(ranks, 2, seeds(range(FEW)))


@pytest.mark.slow
@pytest.mark.tail
@pytest.mark.filterwarnings("ignore:.*returned a view")
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_many_trainings_drawn_at_random_are_those_of_torch(ranks, world_size):
    check(ranks, world_size, seeds(range(FEW, FEW + MANY)))
