"""The examples in the docstrings of the timeline, ranks and measure rooms run as printed."""

import doctest
import importlib
import pkgutil

import pytest

import fsdp_sim.measure
import fsdp_sim.ranks
import fsdp_sim.timeline

ROOMS = (fsdp_sim.timeline, fsdp_sim.ranks, fsdp_sim.measure)
MODULES = [m.name for room in ROOMS for m in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")]
HAVE_EXAMPLES = {
    "fsdp_sim.timeline.timeline",
    "fsdp_sim.ranks.network",
    "fsdp_sim.ranks.run",
    "fsdp_sim.measure.units",
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert failed == 0
    assert attempted or name not in HAVE_EXAMPLES
