"""Finds exercises by their files: ``exercises/<chapter>/<name>.py``. Names cost no import; `load` imports one file."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from pathlib import Path

from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.words import nearest

FOLDER = Path(__file__).parent / "exercises"
CHAPTERS = (
    "memory",
    "collectives",
    "sharding",
    "unit",
    "overlap",
    "wrapping",
    "peak",
    "numerics",
    "checkpoints",
    "scale",
    "migration",
    "bug_hunt",
    "interview",
)
"""In the order of the course."""


@functools.cache
def names() -> dict[str, str]:
    """The names of all exercises and their chapters, in the order of the course.

    Raises:
        ValueError: two chapters have an exercise of the same name.
    """
    found: dict[str, str] = {}
    for chapter in CHAPTERS:
        for module in pkgutil.iter_modules([str(FOLDER / chapter)]):
            if module.name in found:
                raise ValueError(f"{module.name} is an exercise of {found[module.name]} and of {chapter}; rename one")
            found[module.name] = chapter
    return found


@functools.cache
def load(name: str) -> Exercise:
    """An exercise by its name.

    Raises:
        ValueError: there is none; the message names the nearest. Or its solution has another name than its file.
    """
    if name not in names():
        near = nearest(name, names()) or list(names())[:1]
        raise ValueError(f"there is no exercise {name!r}; did you mean {near[0]!r}?")
    chapter = names()[name]
    exercise: Exercise = importlib.import_module(f"fsdp_sim.learn.exercises.{chapter}.{name}").EXERCISE
    if exercise.reference.__name__ != name:
        raise ValueError(
            f"exercise {name}: its solution is called {exercise.reference.__name__}; it has the file's name"
        )
    object.__setattr__(exercise, "name", name)
    object.__setattr__(exercise, "chapter", chapter)
    return exercise


def load_all() -> list[Exercise]:
    """All exercises, in the order of the course: imports every file."""
    return [load(name) for name in names()]
