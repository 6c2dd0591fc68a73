"""Torchrun's agents to start trainings with, and what a training gives that nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.agents import Agents, Job, agents, starting
from tests.faults.runs import SHORT


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        with agents() as server:
            yield server


@pytest.fixture
def start(server: Agents, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start the trainer on the ranks of an agent, in a folder of the test's own; nothing of it outlives the test."""
    with starting(server, tmp_path, SHORT) as start:
        yield start


@pytest.fixture(scope="session")
def undisturbed(server: Agents, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """The same training of 2 ranks from the first step to the last."""
    job = server.start(tmp_path_factory.mktemp("undisturbed"), *SHORT)
    assert job.wait() == 0, job.printed
    return job
