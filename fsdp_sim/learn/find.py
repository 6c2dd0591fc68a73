"""Finds exercises by their files: ``exercises/<chapter>/<name>.py``. Names cost no import; `load` imports one file."""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.words import nearest

FOLDER = Path(__file__).parent / "exercises"
CORE = {
    "memory": ("state_bytes_per_parameter", "seven_billion_on_one_card", "state_bytes_of_a_rank"),
    "collectives": ("owner_or_everyone", "elements_sent", "reduce_scatter_mean"),
    "sharding": ("rows_of_each_rank", "case_02", "audit_of_shards"),
    "unit": ("shard_and_unshard", "kept_for_backward", "hooks_in_forward"),
    "overlap": ("gathers_with_prefetch", "forward_time", "order_of_backward"),
    "wrapping": ("case_06", "attention_of_its_own", "case_08"),
    "peak": ("freed_after_forward", "checkpoint_around_units", "plan_for_long_rows"),
    "numerics": ("add_gradient", "case_14", "samples_drawn_twice"),
    "checkpoints": ("bytes_of_a_state_dict", "case_16", "load_onto_other_shards"),
    "scale": ("case_20", "parameters_between_passes", "name_the_straggler"),
    "migration": ("ddp_step_to_fsdp2", "strategy_in_fsdp2", "ddp_or_fsdp"),
    "bug_hunt": ("case_22", "case_23", "first_to_differ"),
    "interview": ("all_gather_from_sends", "zero1_step", "case_40"),
}
"""By the chapter, in the order of the course: the three exercises that nobody should leave out."""
CHAPTERS = tuple(CORE)
CASE = re.compile(r"(case_\d\d)_(\w+)")
"""The file of a seeded fault is named after what is wrong; a learner knows it by its number."""


@functools.cache
def names() -> dict[str, str]:
    """The names of all exercises and their chapters, in the order of the course.

    Raises:
        ValueError: two chapters have an exercise of the same name.
    """
    return {name: module.partition(".")[0] for name, module in _modules().items()}


def is_core(exercise: Exercise) -> bool:
    """Whether an exercise is one of the three of its chapter's core path."""
    return exercise.name in CORE[exercise.chapter]


def cases(chapter: str = "") -> list[str]:
    """The names of the seeded faults, of one chapter or of all."""
    return [name for name, of in names().items() if name in former().values() and chapter in ("", of)]


@functools.cache
def former() -> dict[str, str]:
    """By the name that says what is wrong, under which an older record of progress has it: the name of each case."""
    files = [module.partition(".")[2] for module in _modules().values()]
    return {case[2]: case[1] for case in map(CASE.fullmatch, files) if case}


@functools.cache
def _modules() -> dict[str, str]:
    """By the name of an exercise its chapter and its file: ``unit.put_hooks``."""
    found: dict[str, str] = {}
    for chapter in CHAPTERS:
        for file in pkgutil.iter_modules([str(FOLDER / chapter)]):
            case = CASE.fullmatch(file.name)
            name = case[1] if case else file.name
            if name in found:
                raise ValueError(
                    f"{name} is an exercise of {found[name].partition('.')[0]} and of {chapter}; rename one"
                )
            found[name] = f"{chapter}.{file.name}"
    return found


@functools.cache
def load(name: str) -> Exercise:
    """An exercise by its name, or a case by the name it had.

    Raises:
        ValueError: there is none; the message names the nearest. Or its solution has another name than its file.
    """
    name = former().get(name, name)
    if name not in names():
        near = nearest(name, names()) or list(names())[:1]
        raise ValueError(f"there is no exercise {name!r}; did you mean {near[0]!r}?")
    exercise: Exercise = importlib.import_module(f"fsdp_sim.learn.exercises.{_modules()[name]}").EXERCISE
    if exercise.reference.__name__ != name:
        raise ValueError(
            f"exercise {name}: its solution is called {exercise.reference.__name__}; it has the exercise's name"
        )
    object.__setattr__(exercise, "name", name)
    object.__setattr__(exercise, "chapter", names()[name])
    return exercise


def file_of(name: str) -> ModuleType:
    """The file of an exercise, with the inputs and the models that its judge uses."""
    return sys.modules[load(name).reference.__module__]


def load_all() -> list[Exercise]:
    """All exercises, in the order of the course: imports every file."""
    return [load(name) for name in names()]
