"""Every case of `tests.labs.measure.allocations.steps` on two real ranks, once."""

from __future__ import annotations

import pytest

from fsdp_sim.simulation import Simulation
from labs.cluster.process_group import RankPlace
from labs.measure.simulated import simulated
from tests.labs.measure.allocations.steps import CASES, CPU, RANKS, config_of, on_ranks


@pytest.fixture(scope="session")
def found():
    """By case, what rank 0 found."""
    return on_ranks(list(CASES))


class Predicted(dict[str, Simulation]):
    """By case, the simulation of the same step: made when it is asked for."""

    def __missing__(self, case: str) -> Simulation:
        place = RankPlace(0, RANKS, 0, RANKS, torchrun=True)
        self[case] = simulated(config_of(case), config_of(case).model_config, place, CPU)
        return self[case]


@pytest.fixture(scope="session")
def predicted():
    return Predicted()
