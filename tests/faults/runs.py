"""The training that the fault tests disturb, and how two of them are compared."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tests.faults.agents import Job

STEPS, SAVE_EVERY = 6, 2
SHORT = (f"--steps={STEPS}", f"--save_every={SAVE_EVERY}", "--global_batch=4", "--seq_len=32", "--n_layer=1",
         "--dropout=0.1", "--timeout_s=30")  # fmt: skip
"""Dropout, so that a random state that was not restored shows."""


def checkpoints(job: Job) -> list[Path]:
    """The committed ones, oldest first."""
    return sorted(path for path in (job.out / "checkpoints").glob("step-*") if path.name[5:].isdigit())


def partial(job: Job) -> list[Path]:
    return sorted((job.out / "checkpoints").glob("*.tmp-*"))


def tensors_of(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of the files that hold tensors: parameters, optimizer state, the random states of all ranks."""
    files = [path for path in checkpoint.rglob("*") if path.is_file() and path.suffix != ".json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def losses(job: Job) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in job.steps}


def assert_same(job: Job, other: Job) -> None:
    """Every loss and every bit of the last checkpoint."""
    assert losses(job) == losses(other), job.printed
    assert tensors_of(checkpoints(job)[-1]) == tensors_of(checkpoints(other)[-1])
    assert not partial(job)
