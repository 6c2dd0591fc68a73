"""Every test of this folder is a sentence about FSDP2, and runs twice: with torch's `fully_shard` and with the mini's.

A test takes the implementation as `impl`, a module with the public names of `torch.distributed.fsdp` and the internal
names that torch's own tests use. Where torch's run fails, the sentence is wrong; where only the mini's does, the mini.
What torch does changes with its version alone: `make test` leaves its runs to `make test-all`.
"""

import importlib
from types import ModuleType

import pytest
import torch

MODULES = {"torch": "tests.mini.parity.of_torch", "mini": "fsdp_sim.mini"}


@pytest.fixture(params=[pytest.param("torch", marks=pytest.mark.tail), "mini"], ids="of_{}".format)
def impl(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(MODULES[request.param])


@pytest.fixture
def since_torch_2_13(request: pytest.FixtureRequest) -> None:
    """What torch learnt in 2.13 the mini can always do."""
    has_it = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 13)
    if request.getfixturevalue("impl").__name__ == MODULES["torch"] and not has_it:
        pytest.skip(f"torch {torch.__version__} does not have it yet")
