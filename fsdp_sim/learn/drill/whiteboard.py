"""``whiteboard(name)``: an exercise against the clock, as in an interview."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape

from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.find import load
from fsdp_sim.learn.verdict import Verdict


@dataclass(repr=False)
class Whiteboard:
    """A clock that runs since it was made. ``stop`` after each check says how much of the time was used."""

    exercise: Exercise
    clock: Callable[[], float] = time.monotonic
    since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.since_s = self.clock()

    def __repr__(self) -> str:
        return (
            f"{self.exercise.title}: the clock runs. You have {self.exercise.minutes} minutes; say aloud what you do."
        )

    def _repr_html_(self) -> str:
        return f'<div style="border-left:5px solid #E69F00;padding:.4em .8em">{escape(repr(self))}</div>'

    def stop(self, checked: Verdict) -> str:
        """What an interviewer would note of a verdict and the time it took."""
        took_s, given_s = self.clock() - self.since_s, 60 * self.exercise.minutes
        used = f"{took_s // 60:.0f} of {self.exercise.minutes} minutes"
        if not checked.passed:
            left_s = given_s - took_s
            return f"Not yet, after {used}. " + (
                "Go on." if left_s > 0 else "Time is up: take a hint, and come back to it."
            )
        return f"Right after {used}. " + ("In time." if took_s <= given_s else "Over time: once more in a week.")


def whiteboard(name: str) -> Whiteboard:
    """Start the clock for an exercise.

    Raises:
        ValueError: there is no such exercise; the message names the nearest.
    """
    return Whiteboard(load(name))
