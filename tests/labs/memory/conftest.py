"""The cases of `tests.labs.memory.steps` on two real ranks, once for each file."""

from __future__ import annotations

import msgspec
import pytest

from fsdp_sim.ranks import run
from labs.place import Place
from labs.simulated import simulated
from tests.labs.memory.steps import CASES, CPU, RANKS, Found, config_of, count


@pytest.fixture(scope="module")
def cases():
    """All of them; a file that needs few says which."""
    return list(CASES)


@pytest.fixture(scope="module")
def found(cases):
    """By case, what rank 0 found."""
    ranks = run(count, RANKS, cases, record=False, progress=False, show_output=False, timeout_s=600.0)
    return msgspec.json.decode(ranks[0], type=dict[str, Found])


@pytest.fixture(scope="session")
def predicted():
    """By case, the simulation of the same step."""
    place = Place(0, RANKS, 0, RANKS, torchrun=True)
    return {case: simulated(config_of(case), config_of(case).model_config, place, CPU) for case in CASES}
