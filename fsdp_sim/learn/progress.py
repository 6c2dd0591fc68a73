"""What became of each exercise, prediction and level of the puzzle. Kept in the learner's file of progress."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from fsdp_sim.learn import kept
from fsdp_sim.learn.find import former
from fsdp_sim.learn.kept import VARIABLE, path
from fsdp_sim.learn.verdict import Grade

__all__ = [
    "VARIABLE",
    "Climb",
    "Estimate",
    "ExerciseEntry",
    "ExerciseState",
    "change",
    "climbed",
    "entry",
    "estimates",
    "keep_climb",
    "keep_estimate",
    "keep_puzzle",
    "path",
    "puzzles",
    "read",
]

VERSION = 1


class ExerciseState(StrEnum):
    """Where an exercise stands. ``SEEN``: its solution was looked at before it was solved."""

    OPEN = "open"
    TRIED = "tried"
    PASSED = "passed"
    OPTIMAL = "optimal"
    SEEN = "seen"


class ExerciseEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of one exercise.

    Attributes:
        grade: the best so far, a `Grade`.
        hints: how many were asked for.
        seen: the solution was looked at before it was solved.
    """

    tries: int = 0
    grade: int = 0
    hints: int = 0
    seen: bool = False

    @property
    def state(self) -> ExerciseState:
        if self.seen:
            return ExerciseState.SEEN
        if self.grade:
            return ExerciseState.OPTIMAL if self.grade >= Grade.OPTIMAL else ExerciseState.PASSED
        return ExerciseState.TRIED if self.tries else ExerciseState.OPEN


class Estimate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of the first answer to a prediction.

    Attributes:
        right: it was the right choice, or close.
        ratio: of a quantity, the answer over the truth.
    """

    right: bool
    ratio: float | None = None


class Climb(msgspec.Struct, frozen=True):
    """When the learner's own FSDP trained as torch's.

    Attributes:
        text: the digest of its file then.
        on: the day, as 2026-11-28.
    """

    text: str
    on: str


class _File(msgspec.Struct, omit_defaults=True):
    exercises: dict[str, ExerciseEntry] = {}
    predictions: dict[str, Estimate] = {}
    puzzles: dict[str, int] = {}
    climb: Climb | None = None
    version: int = VERSION


def read() -> dict[str, ExerciseEntry]:
    """All entries; empty if there is no file or it is damaged."""
    return _by_name(kept.read(path(), _File).exercises)


def entry(name: str) -> ExerciseEntry:
    """What is kept of one exercise."""
    return read().get(name, ExerciseEntry())


def change(name: str, how: Callable[[ExerciseEntry], ExerciseEntry | None]) -> str:
    """Change the entry of an exercise, or remove it where ``how`` answers None.

    Returns:
        what went wrong, as a sentence; empty if nothing did.
    """

    def changed(file: _File) -> _File:
        known = _by_name(file.exercises)
        new = how(known.get(name, ExerciseEntry()))
        others = {key: value for key, value in known.items() if key != name}
        exercises = dict(sorted((others | ({name: new} if new else {})).items()))
        return msgspec.structs.replace(file, exercises=exercises)

    return kept.change(path(), _File, changed)


def _by_name(entries: dict[str, ExerciseEntry]) -> dict[str, ExerciseEntry]:
    """The entries by the names that exercises have today; one under today's name counts more."""
    return {
        former().get(name, name): entry for name, entry in sorted(entries.items(), key=lambda e: e[0] not in former())
    }


def estimates() -> dict[str, Estimate]:
    """The first answer to each prediction."""
    return kept.read(path(), _File).predictions


def keep_estimate(name: str, given: Estimate) -> str:
    """Keep the answer to a prediction, unless there is one already.

    Returns:
        what went wrong, as a sentence; empty if nothing did.
    """

    def changed(file: _File) -> _File:
        return msgspec.structs.replace(file, predictions={name: given} | file.predictions)

    return kept.change(path(), _File, changed)


def puzzles() -> dict[str, int]:
    """The stars of each level of the schedule puzzle that was won: 1 for its goal, 2 where no order is faster."""
    return kept.read(path(), _File).puzzles


def keep_puzzle(name: str, stars: int) -> str:
    """Keep the stars of a level, unless it has as many already.

    Returns:
        what went wrong, as a sentence; empty if nothing did.
    """

    def changed(file: _File) -> _File:
        most = max(stars, file.puzzles.get(name, 0))
        return msgspec.structs.replace(file, puzzles=file.puzzles | {name: most})

    return kept.change(path(), _File, changed)


def climbed() -> Climb | None:
    """When the learner's own FSDP last trained as torch's; None if it never has."""
    return kept.read(path(), _File).climb


def keep_climb(given: Climb) -> str:
    """Keep that the learner's own FSDP trained as torch's; of the same file the first day stays.

    Returns:
        what went wrong, as a sentence; empty if nothing did.
    """

    def changed(file: _File) -> _File:
        again = file.climb is not None and file.climb.text == given.text
        return file if again else msgspec.structs.replace(file, climb=given)

    return kept.change(path(), _File, changed)
