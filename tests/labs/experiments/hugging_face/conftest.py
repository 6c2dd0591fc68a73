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
    from labs.experiments.hugging_face import with_fully_shard
    from labs.experiments.hugging_face.batches import Task
    from labs.experiments.hugging_face.measuring import MeasuredTraining
    from labs.experiments.hugging_face.run_hugging_face import WAYS

    t5 = Task("t5")
    made = {f"bert {way}": MeasuredTraining.of(start, Task("bert"), 2) for way, start in WAYS.items()}
    made |= {f"t5 {way}": MeasuredTraining.of(WAYS[way], t5, 2) for way in ("fully_shard", "accelerate")}
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
