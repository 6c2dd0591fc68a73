"""The examples in the docstrings of the spec, schedule and engine rooms run as printed."""

import doctest
import importlib
import pkgutil

import pytest

import fsdp_sim.engine
import fsdp_sim.schedule
import fsdp_sim.spec

ROOMS = (fsdp_sim.spec, fsdp_sim.schedule, fsdp_sim.engine)
MODULES = [m.name for room in ROOMS for m in pkgutil.iter_modules(room.__path__, f"{room.__name__}.")]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name):
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_there_are_examples():
    found = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert found >= 10
