"""The cause of a seeded fault, which a learner names before it is told: a prediction, made from the exercises' data."""

from __future__ import annotations

import functools
import itertools
import random

from fsdp_sim.learn import progress
from fsdp_sim.learn.find import CHAPTERS, cases, load
from fsdp_sim.learn.predictions.prediction import Prediction

CHOICES = 5


@functools.cache
def question(name: str) -> Prediction:
    """Which of the causes of this chapter's faults is it? Where a chapter has few, those of the nearest chapters too.

    Raises:
        ValueError: the exercise is no seeded fault.
    """
    exercise = load(name)
    if not exercise.cause:
        raise ValueError(f"{name} is {exercise.kind.value!r}: only of a seeded fault one names the cause")
    here, draw = CHAPTERS.index(exercise.chapter), random.Random(exercise.name)
    others: list[str] = []
    for chapter in sorted(CHAPTERS, key=lambda chapter: abs(CHAPTERS.index(chapter) - here)):
        more = [load(case).cause for case in cases(chapter) if case != exercise.name]
        others += draw.sample(more, len(more))
    choices = [exercise.cause, *itertools.islice(dict.fromkeys(others), CHOICES - 1)]
    return asked(exercise.name, exercise.name, exercise.cause, choices, draw)


def asked(name: str, of: str, cause: str, choices: list[str], draw: random.Random) -> Prediction:
    """Which of the choices is the cause? ``of`` is what a reader calls what is broken."""
    shuffled = tuple(draw.sample(choices, len(choices)))
    return Prediction(f"What is wrong in {of}?", cause, "Now mend it.", choices=shuffled, name=name)


def told(name: str, cause: str, named: progress.Estimate | None) -> str:
    """To who has mended it: the cause and whether it was named before, or the question after it."""
    if named is None:
        return f'What was the cause? Say it with `predict("{name}")`.'
    return f"The cause was: {cause}. {'You named it.' if named.right else 'You had named another.'}"
