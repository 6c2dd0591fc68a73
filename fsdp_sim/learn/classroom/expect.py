"""What to expect of a chapter: wrong answers and shortcuts of each exercise, what helps, and what to ask the room.

The wrong answers are those that the exercises themselves know, so they are never out of date. Questions and sentences
are written by hand, in ``notebooks/instructor/expect.toml``; what people believe is in `fsdp_sim.learn.statements`.
"""

from __future__ import annotations

import ast
import functools
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fsdp_sim.learn.classroom.sections import instructor
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import AS_GIVEN, Exercise, Wrong
from fsdp_sim.learn.find import CHAPTERS, load, names
from fsdp_sim.learn.statements import WITH_STATEMENTS, Misconception, misconceptions

LONGEST_CODE = 110  # characters of a wrong answer that is shown as code
LONGEST_CHANGE = 2 * LONGEST_CODE  # of what it changes in the solution
PLAIN = {
    "expected": "what was expected and what was found",
    "numbers differ": "which numbers differ",
    "all of it is zero": "that all of it is zero",
    "measure it": "to measure it",
}
"""What is told where the message only introduces numbers."""


class ClassQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A question to the room, and what a good answer contains."""

    ask: str
    good: str


class Sentence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sentence that usually helps with an exercise."""

    exercise: str
    say: str


class Notes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was written by hand about a chapter.

    Attributes:
        believed: rows of the coverage map, such as ``misconception 17``, that a statement of the chapter answers.
    """

    name: str
    question: tuple[ClassQuestion, ...]
    sentence: tuple[Sentence, ...]
    believed: tuple[str, ...] = ()

    @property
    def statements(self) -> list[Misconception]:
        """The statements that answer what is believed."""
        entries = misconceptions(self.name).entries if self.name in WITH_STATEMENTS else ()
        return [entry for row in self.believed for entry in entries if row in entry.covers]

    def sentence_for(self, exercise: str) -> str:
        """The sentence that helps with an exercise; empty if there is none."""
        return next((one.say for one in self.sentence if one.exercise == exercise), "")


def notes(file: Path | None = None) -> dict[str, Notes]:
    """What was written by hand, by chapter. A chapter may have none: its page then has what is generated.

    Args:
        file: to read; the kit's own if None.

    Raises:
        ValueError: something is wrong in the file; the message names the chapter and what would be right.
    """
    file = file or instructor() / "expect.toml"
    found = {}
    for number, table in enumerate(tomllib.loads(file.read_text(encoding="utf-8")).get("chapter", ()), start=1):
        place = f"{file.name}, chapter {table.get('name', number)}"
        try:
            of = msgspec.convert(table, Notes)
        except msgspec.ValidationError as error:
            raise ValueError(f"{place}: {error}") from None
        _check(of, place)
        found[of.name] = of
    return found


def _check(of: Notes, place: str) -> None:
    if of.name not in CHAPTERS:
        raise ValueError(f"{place}: there are {', '.join(CHAPTERS)}")
    for one in of.sentence:
        if names().get(one.exercise) != of.name:
            raise ValueError(f"{place}: it has no exercise {one.exercise!r}")
    if len(of.statements) != len(of.believed):
        answered = {row for entry in of.statements for row in entry.covers}
        missing = ", ".join(row for row in of.believed if row not in answered)
        raise ValueError(f"{place}: no entry of misconceptions({of.name!r}) answers {missing}")


def exercises_of(chapter: str) -> list[Exercise]:
    """The exercises of a chapter, in order: imports their files.

    Raises:
        ValueError: there is no such chapter.
    """
    if chapter not in CHAPTERS:
        raise ValueError(f"there is no chapter {chapter!r}; there are {', '.join(CHAPTERS)}")
    return [load(name) for name, of in names().items() if of == chapter]


def who(answers: Sequence[Wrong], exercise: Exercise) -> list[str]:
    """What each wrong answer is, in words: its name, what it changes in the solution, short code in
    backticks, or nothing.

    A function that another one has made is named by what made it, as it stands in the exercise's file.
    """
    code = _as_written(exercise)
    shared = Counter(answer.function.__name__ for answer in answers)
    return [
        AS_GIVEN if answer.function is exercise.stub else _who(answer.function, shared, code.get(id(answer), ""))
        for answer in answers
    ]


def _who(function: Callable[..., Any], shared: Counter[str], code: str) -> str:
    if isinstance(function, Edit):
        changes = function.name or " and ".join(_change(old, new) for old, new in function.texts.items())
        return changes if len(changes) <= LONGEST_CHANGE else ""
    name, qualified = function.__name__, getattr(function, "__qualname__", "")
    if name.isidentifier() and name != "wrong" and "<locals>" not in qualified and shared[name] == 1:
        return name.replace("_", " ")
    return f"`{code}`" if code and len(code) <= LONGEST_CODE else ""


def _change(old: str, new: str) -> str:
    old, added, new = (" ".join(text.split()) for text in (old, new.replace(old, ""), new))
    return f"without `{old}`" if not new else f"with `{added}`" if old in new else f"`{new}` in place of `{old}`"


def _as_written(exercise: Exercise) -> dict[int, str]:
    """How the function of each wrong answer is written in the file, by the answer's id; nothing where it is made."""
    written: dict[int, str] = {}
    for field in ("wrong", "shortcuts"):
        answers: tuple[Wrong, ...] = getattr(exercise, field)
        calls = _calls(sys.modules[exercise.reference.__module__].__file__ or "", field)
        if len(calls) == len(answers):  # else some are made in a loop
            written |= {id(answer): call for answer, call in zip(answers, calls, strict=True)}
    return written


@functools.cache
def _calls(file: str, field: str) -> tuple[str, ...]:
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Exercise":
            value = next((keyword.value for keyword in node.keywords if keyword.arg == field), None)
            elements = value.elts if isinstance(value, ast.Tuple) else []
            return tuple(ast.unparse(e.args[0]) for e in elements if isinstance(e, ast.Call) and e.args)
    return ()


def whole_message(exercise: Exercise, message: str) -> str:
    """What the one who answers so is told: the whole sentence where the judge has it, else the part that is known."""
    causes: Sequence[tuple[object, str]] = getattr(exercise.judge, "causes", ())
    return next((text for _, text in causes if message in text), PLAIN.get(message, message))
