"""``hint`` and ``solution``: help in four steps, each of which one asks for."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from html import escape

from msgspec import structs

from fsdp_sim.learn import progress
from fsdp_sim.learn.find import load
from fsdp_sim.learn.sources import solution_source
from fsdp_sim.learn.verdict import with_code

STEPS = ("the concept", "the principle", "almost the code")


@dataclass(frozen=True, repr=False)
class Help:
    """A heading, text, and code where there is some; shown in a notebook and in a terminal."""

    heading: str
    text: str
    code: str = ""

    def __str__(self) -> str:
        code = f"\n\n{textwrap.indent(self.code, '    ')}" if self.code else ""
        return f"{self.heading}: {self.text}{code}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        code = f"<pre>{escape(self.code)}</pre>" if self.code else ""
        return (
            f'<div style="border-left:5px solid #0072B2;padding:.4em .8em">'
            f"<b>{escape(self.heading)}:</b> {with_code(self.text)}{code}</div>"
        )


def hint(name: str) -> Help:
    """The next of the three hints of an exercise; after the third, the third again.

    Raises:
        ValueError: there is no such exercise; the message names the nearest.
    """
    exercise = load(name)
    number = min(progress.entry(name).hints, len(STEPS) - 1)
    trouble = progress.change(name, lambda entry: structs.replace(entry, hints=number + 1))
    return Help(f"Hint {number + 1} of {len(STEPS)}, {STEPS[number]}", f"{exercise.hints[number]} {trouble}".strip())


def solution(name: str) -> Help:
    """The reference solution of an exercise and why it is as it is. That it was looked at goes on the board.

    Raises:
        ValueError: there is no such exercise; the message names the nearest.
    """
    exercise = load(name)
    trouble = progress.change(name, lambda entry: structs.replace(entry, seen=entry.seen or not entry.grade))
    return Help(f"Solution of {exercise.title}", f"{exercise.why} {trouble}".strip(), solution_source(exercise))


def reset(name: str) -> None:
    """Forget what was done in an exercise: tries, grade, hints, and that its solution was seen.

    Raises:
        ValueError: there is no such exercise. OSError: the file cannot be written.
    """
    load(name)
    if trouble := progress.change(name, lambda entry: None):
        raise OSError(trouble)
