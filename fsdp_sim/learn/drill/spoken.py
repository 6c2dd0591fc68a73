"""Questions that are answered in words: what a strong answer contains, and what is asked next.

What is said is heard by `listening`. The number that a strong answer comes with is that of a template, computed when it
is shown.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Collection
from importlib.resources import files

import msgspec

from fsdp_sim.learn.drill.template import LEVELS, TOPICS, templates

ENOUGH = 2 / 3
"""The part of the points that makes an answer a good one."""


class FollowUp(msgspec.Struct, frozen=True):
    """What the interviewer asks next, and what a strong answer to that says, in one to three sentences."""

    question: str
    strong: str

    def __post_init__(self) -> None:
        _plain(self.question, "?", 240)
        _plain(self.strong, ".", 420)
        if not 1 <= len(re.findall(r"[.?](?= |$)", self.strong)) <= 3:
            raise ValueError(f"{self.strong!r} should be one to three sentences")


class SpokenQuestion(msgspec.Struct, frozen=True):
    """A question for two minutes of talk.

    Attributes:
        points: what a strong answer contains, each a sentence; the first is the one without which it is none.
        number: the template whose answer is the number to come with; empty if there is none.
        ladder: three follow-ups, each harder than the one before.

    Raises:
        ValueError: something about it is not as it should be; the message quotes it.
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

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", self.name):
            raise ValueError(f"{self.name!r} should be a name of words_like_this")
        if self.topic not in TOPICS or self.level not in LEVELS or not 60 <= self.seconds <= 180:
            raise ValueError(
                f"{self.name}: {self.topic!r}, {self.level}, {self.seconds}: the topic is one of {', '.join(TOPICS)}, "
                f"the level one of {LEVELS}, the seconds are 60 to 180"
            )
        if not 4 <= len(set(self.points)) == len(self.points) <= 7 or len(self.ladder) != 3:
            raise ValueError(f"{self.name}: it needs four to seven different points and three follow-ups")
        _plain(self.question, ("?", "."), 240)
        for point in self.points:
            _plain(point, ".", 240, at_least=30)

    def example(self, seed: int) -> str:
        """The number to come with, for an instance drawn from ``seed``; empty if there is none."""
        if not self.number:
            return ""
        question = templates()[self.number].ask(seed)
        return f"{question.text} {question.expected}. {question.why}"

    def good(self, made: Collection[int]) -> bool:
        """Whether those points make it a good answer: the first, and two thirds of all."""
        return 0 in made and len(made) >= ENOUGH * len(self.points)


def _plain(text: str, end: str | tuple[str, ...], at_most: int, at_least: int = 0) -> None:
    """Raises ValueError where a text is too long, too short, or not written plainly."""
    if not at_least < len(text) < at_most:
        raise ValueError(f"{text!r} has {len(text)} characters; it should have {at_least + 1} to {at_most - 1}")
    if not text.isascii() or re.search(r"!|  |\n|\bTODO\b", text) or not text.endswith(end):
        raise ValueError(f"{text!r} should be plain sentences in ASCII that end with {' or '.join(end)}")


@functools.cache
def spoken() -> dict[str, SpokenQuestion]:
    """All of them by name, in the order of the file."""
    text = (files("fsdp_sim.learn.drill") / "spoken.toml").read_text(encoding="utf-8")
    table = tomllib.loads(text)
    return {name: msgspec.convert({"name": name, **entry}, SpokenQuestion) for name, entry in table.items()}
