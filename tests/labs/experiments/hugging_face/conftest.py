"""All trainings of these tests, once: one process, and two ranks through everything."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest

PACKAGES = ("transformers", "accelerate", "lightning_fabric")


@pytest.fixture(scope="session", autouse=True)
def _packages():
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: make dev")


@pytest.fixture(scope="session")
def jobs(_packages):
    """By name; two steps each."""
    from labs.experiments.hugging_face import with_accelerate, with_fully_shard
    from labs.experiments.hugging_face.batches import Task
    from labs.experiments.hugging_face.measuring import MeasuredTraining
    from labs.experiments.hugging_face.run_hugging_face import WAYS

    t5, bert = Task("t5"), Task("bert")
    made = {
        f"{task.family} {way}": MeasuredTraining.of(start, task, 2)
        for task in (t5, bert)
        for way, start in WAYS.items()
    }
    made["t5 as it is"] = MeasuredTraining.of(with_accelerate.start_as_it_is, t5, 2)
    made["t5 checkpointing"] = MeasuredTraining.of(
        with_fully_shard.start_fsdp2, dataclasses.replace(t5, checkpointing=True), 2
    )
    return made


@pytest.fixture(scope="session")
def alone(jobs):
    """What one process saw, by family."""
    from fsdp_sim.ranks import run
    from labs.experiments.hugging_face.measuring import MeasuredTraining, watch
    from labs.experiments.hugging_face.with_fully_shard import start_single

    single = {
        family: MeasuredTraining(start_single, jobs[f"{family} fully_shard"].task, jobs[f"{family} fully_shard"].whole)
        for family in ("t5", "bert")
    }
    return run(watch, 1, single, record=False, timeout_s=120, progress=False)[0]


@pytest.fixture(scope="session")
def seen(jobs):
    """What each of two ranks saw."""
    from fsdp_sim.ranks import run
    from labs.experiments.hugging_face.measuring import watch

    return list(run(watch, 2, jobs, record=False, timeout_s=120, progress=False))
