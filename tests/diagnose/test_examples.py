"""The examples in the docstrings of the room run as printed."""

import doctest
import importlib
import pkgutil

import pytest

import fsdp_sim.diagnose

MODULES = [m.name for m in pkgutil.iter_modules(fsdp_sim.diagnose.__path__, "fsdp_sim.diagnose.")]
HAVE_EXAMPLES = {"fsdp_sim.diagnose.diagnosis", "fsdp_sim.diagnose.bandwidth"}


@pytest.mark.parametrize("name", MODULES)
def test_examples_run_as_printed(name: str) -> None:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    assert failed == 0
    assert attempted or name not in HAVE_EXAMPLES
