"""A class's results as a table in the terminal and as a figure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdp_sim.learn.classroom.rollup import STATES, ExerciseSummary

if TYPE_CHECKING:
    from fsdp_sim.viz import Picture

MOST = 10
"""Mistakes in the list of those most met."""


def show(found: Sequence[ExerciseSummary], learners: int) -> None:
    """Print how many have solved what, and the mistakes most met."""
    console = Console()
    table = Table("exercise", "chapter", "solved", "tried", "tries", "mistake most met")
    for summary in found:
        tried = sum(summary.states[state] for state in STATES[1:])
        cells = (
            summary.exercise.name, summary.exercise.chapter, f"{summary.solved} of {learners}", str(tried),
            "" if summary.tries is None else f"{summary.tries:g}",
            f"{summary.mistakes[0][0]} ({summary.mistakes[0][1]})" if summary.mistakes else "",
        )  # fmt: skip
        table.add_row(*map(escape, cells))
    console.print(table)
    met = Counter({(s.exercise.name, m): n for s in found for m, n in s.mistakes}).most_common(MOST)
    if met:
        console.print("Most met:")
        for (name, mistake), times in met:
            console.print(f"  {times} x {escape(name)}: {escape(mistake)}", highlight=False)


def picture(found: Sequence[ExerciseSummary]) -> Picture:
    """A bar for each exercise: how many learners are in which state.

    Raises:
        ValueError: nobody has begun an exercise.
    """
    from fsdp_sim.learn.pictures.memory import stacks

    if not found:
        raise ValueError("nobody has begun an exercise, so there is nothing to draw")
    bars = {s.exercise.name: {str(state): float(s.states[state]) for state in STATES[::-1]} for s in found}
    least = min(found, key=lambda summary: summary.solved)
    return stacks(bars, f"{least.exercise.name} was solved least: by {least.solved}.", "learners")
