"""Checkpoints while training goes on: a save that fails is said loudly, and costs nothing else."""

from __future__ import annotations

from labs.loop.metrics import Metrics
from labs.loop.run_state import RunState


def save(training: RunState, metrics: Metrics, *, last: bool = False) -> bool:
    """Write a checkpoint of this step, all ranks together; whether there is one.

    Args:
        last: nothing comes after it, so it is not written in the background.
    """
    report_failed_saves(training, metrics, wait=True)  # the one before, if it is still being written
    asynchronous, before = training.run.config.async_save and not last, training.saved
    saved = training.save(asynchronous=asynchronous)
    if not saved:
        _say(training, metrics)
    elif training.saved > before:
        metrics.event("saving" if asynchronous else "saved", step=training.step)
    for line in training.checkpointer.messages() if training.checkpointer else ():
        metrics.say(line)
    return saved


def report_failed_saves(training: RunState, metrics: Metrics, *, wait: bool = False) -> None:
    """Say which saves in the background have failed: of those that ended, or of all (``wait``, on all ranks)."""
    if not training.look_after_saves(wait=wait):
        _say(training, metrics)


def _say(training: RunState, metrics: Metrics) -> None:
    why = training.failed_saves[-1]
    metrics.say(f"WARNING: {why}; training goes on, and what was saved before is as it was")
    metrics.event("not saved", why=why)
