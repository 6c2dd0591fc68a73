"""Every case of `tests.labs.measure.allocations.steps` on two real ranks, once."""

from __future__ import annotations

import pytest

from labs.cluster.process_group import RankPlace
from labs.measure.simulated import simulated
from tests.labs.measure.allocations.steps import CASES, CPU, RANKS, config_of, on_ranks


@pytest.fixture(scope="session")
def found():
    """By case, what rank 0 found."""
    return on_ranks(list(CASES))


@pytest.fixture(scope="session")
def predicted():
    """By case, the simulation of the same step."""
    place = RankPlace(0, RANKS, 0, RANKS, torchrun=True)
    return {case: simulated(config_of(case), config_of(case).model_config, place, CPU) for case in CASES}
