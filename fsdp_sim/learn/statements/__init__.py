"""What people say about a chapter's subject, each statement folded with what is true.

One file for each chapter, with ``MISCONCEPTIONS = (Misconception(...), ...)``, in which the statements that a chapter
shows come first. `fsdp_sim.learn.statements.evidence` helps to settle a statement by calling torch or computing it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from importlib import import_module

from fsdp_sim.learn.find import CHAPTERS
from fsdp_sim.learn.verdict import with_code

STRESSED = re.compile(r"\*(\w[^*]*)\*")
WIDTH = 100  # characters of a line in a terminal
MAX_STATEMENT, MAX_TRUTH = 160, 420  # characters
MOST_SHOWN = 6  # of a chapter; the others wait behind one more fold
FOLD = '<details style="margin:.3em 0"><summary style="cursor:pointer">'
WITH_STATEMENTS = tuple(chapter for chapter in CHAPTERS if chapter != "interview")
"""The chapters that have statements, in the order of the course: interviews ask about all of them."""


@dataclass(frozen=True)
class Misconception:
    """A statement that is wrong, outdated or half the truth, and the truth. Code stands between backticks,
    what is stressed between asterisks.

    Attributes:
        covers: the rows of the coverage map that it answers: ``misconception 13`` (part 1), ``misconception 3.6``
            (part 2).
        holds: what settles it: called without arguments, it is true. The tests call it.

    Raises:
        ValueError: a text is too long or not well formed; the message quotes it.
    """

    statement: str
    truth: str
    covers: tuple[str, ...]
    holds: Callable[[], bool] | None = None

    def __post_init__(self) -> None:
        for text, most in ((self.statement, MAX_STATEMENT), (self.truth, MAX_TRUTH)):
            if not 10 < len(text) <= most:
                raise ValueError(f"{text!r} has {len(text)} characters; it should have 11 to {most}")
            if "\n" in text or "  " in text or text.count("`") % 2 or text[-1] not in ".)?!`":
                raise ValueError(f"{text!r} should be one paragraph of sentences, each backtick with its second")
        if not self.covers:
            raise ValueError(f"{self.statement!r} covers no row of the coverage map")


@dataclass(frozen=True, repr=False)
class Misconceptions:
    """The statements of a chapter; in a notebook each is folded, with the truth inside, and most of them once more."""

    entries: tuple[Misconception, ...]

    @property
    def shown(self) -> tuple[Misconception, ...]:
        """Those that a reader sees at once."""
        return self.entries[:MOST_SHOWN]

    @property
    def others(self) -> tuple[Misconception, ...]:
        """Those behind the last fold."""
        return self.entries[MOST_SHOWN:]

    @property
    def heading(self) -> str:
        return f"{len(self.shown)} things that people say. Before you open one, say what is wrong with it."

    def __str__(self) -> str:
        lines = [self.heading]
        for entry in self.entries:
            if entry in self.others[:1]:
                lines += ["", f"{len(self.others)} more:"]
            lines += ["", *textwrap.wrap(f"“{entry.statement}”", WIDTH)]
            lines += textwrap.wrap(entry.truth, WIDTH, initial_indent="    → ", subsequent_indent="      ")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        others = _folded(self.others)
        if others:
            others = f"{FOLD}{len(self.others)} more</summary>{others}</details>"
        return f"<p>{escape(self.heading)}</p>{_folded(self.shown)}{others}"


def _folded(entries: tuple[Misconception, ...]) -> str:
    return "".join(
        f"{FOLD}“{_html(entry.statement)}”</summary>"
        f'<p style="margin:.3em 0 .8em;border-left:5px solid #0072B2;padding:.2em .8em">'
        f"<b>In truth:</b> {_html(entry.truth)}</p></details>"
        for entry in entries
    )


def _html(text: str) -> str:
    return STRESSED.sub(r"<em>\1</em>", with_code(text))


def misconceptions(chapter: str) -> Misconceptions:
    """What people say about the subject of a chapter ("memory", "overlap", ...).

    Raises:
        ValueError: there is no such chapter, or it has no statements; the message names those that have.
    """
    if chapter not in WITH_STATEMENTS:
        raise ValueError(f"there is no chapter {chapter!r}; there are {', '.join(WITH_STATEMENTS)}")
    return Misconceptions(import_module(f"{__name__}.{chapter}").MISCONCEPTIONS)
