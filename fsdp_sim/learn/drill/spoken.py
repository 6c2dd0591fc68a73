"""Questions that are answered in words: what a strong answer contains, and what is asked next.

One speaks, then sees the points and says which of them one made. The number that a strong answer comes with is that of
a template, computed when it is shown.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Collection
from importlib.resources import files

import msgspec

from fsdp_sim.learn.drill.question import letters
from fsdp_sim.learn.drill.template import templates

ENOUGH = 2 / 3
"""The part of the points that makes an answer a good one."""


VERDICTS = {True: "✓ A good answer.", False: "✗ Not enough of them, or not the first."}


class FollowUp(msgspec.Struct, frozen=True):
    """What the interviewer asks next, and what a strong answer to that says."""

    question: str
    strong: str


class Spoken(msgspec.Struct, frozen=True):
    """A question for two minutes of talk.

    Attributes:
        points: what a strong answer contains, each a sentence; the first is the one without which it is none.
        number: the template whose answer is the number to come with; empty if there is none.
        ladder: three follow-ups, each harder than the one before.
    """

    name: str
    topic: str
    level: int
    seconds: int
    section: str
    question: str
    points: tuple[str, ...]
    ladder: tuple[FollowUp, ...]
    number: str = ""

    def example(self, seed: int) -> str:
        """The number to come with, for an instance drawn from ``seed``; empty if there is none."""
        if not self.number:
            return ""
        question = templates()[self.number].ask(seed)
        return f"{question.text} {question.expected}. {question.why}"

    def made(self, typed: str) -> set[int]:
        """The places of the points that one says one made, typed as letters; nothing for none.

        Raises:
            UnreadableError: these are not letters of points.
        """
        wanted = len([c for c in typed if c.isalnum()])
        return set(letters(typed, len(self.points), wanted)) if wanted else set()

    def good(self, made: Collection[int]) -> bool:
        """Whether those points make it a good answer: the first, and two thirds of all."""
        return 0 in made and len(made) >= ENOUGH * len(self.points)


@functools.cache
def spoken() -> dict[str, Spoken]:
    """All of them by name, in the order of the file."""
    text = (files("fsdp_sim.learn.drill") / "spoken.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {name: msgspec.convert({"name": name, **entry}, Spoken) for name, entry in table.items()}
