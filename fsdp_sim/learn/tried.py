"""`tried`: what a function of an exercise does on ranks, once its check has said yes or no."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsdp_sim.learn.find import load
from fsdp_sim.learn.judges import OnRanks
from fsdp_sim.ranks import Results, run


def tried(name: str, function: Callable[..., Any]) -> Results:
    """Run a function on ranks with the inputs that the check of an exercise gives it first.

    Args:
        name: of the exercise, such as ``case_22``.

    Returns:
        What it returned on each rank, with their records (see `fsdp_sim.ranks.run`).

    Raises:
        ValueError: it is an exercise of another kind.
    """
    judge = load(name).judge
    if not isinstance(judge, OnRanks):
        raise ValueError(f"{name} is not run on ranks")
    inputs = judge.inputs(0)
    return run(function, len(inputs), each=inputs, progress=False, show_output=False)
