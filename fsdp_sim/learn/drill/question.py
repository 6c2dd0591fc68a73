"""What an interviewer can ask and a machine can judge: a `Number`, a `Choice`, an `Order`.

Each is one drawn instance of a template (see `template`): its numbers are in its text and in ``given``. ``grade`` takes
what was typed and says whether it is right; a wrong answer that has a usual cause is answered with it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from string import ascii_lowercase
from typing import Any, ClassVar

from fsdp_sim.learn.drill.numbers import number_in
from fsdp_sim.learn.drill.slips import slip
from fsdp_sim.learn.quantity import unit_meant, written
from fsdp_sim.learn.verdict import COLOURS, Grade

CLOSE = 0.05
ASKS = re.compile(r"\?|(?:^|[.:] )(?:Put|Order|Sort|Name|Say|Choose|Count)\b")
"""What a question must have: without it, its text has lost its end."""


class UnreadableError(ValueError):
    """What was typed is no answer to the question: it is asked again, and not held against anyone."""


@dataclass(frozen=True, repr=False)
class Reply:
    """The answer to an answer.

    Attributes:
        cause: why people answer so, where that is known.
        why: how the right answer comes about, with the numbers of the question.
        heard: what of the answer was judged; empty where that is all of it.
    """

    right: bool
    expected: str
    cause: str
    why: str
    heard: str = ""

    def __str__(self) -> str:
        heard = f"I heard {self.heard}. " if self.heard else ""
        if self.right:
            return f"✓ {heard}Right: {self.expected}. {self.why}"
        cause = f"What happened: {self.cause}. " if self.cause else ""
        return f"✗ {heard}Not quite. {cause}Right is {self.expected}. {self.why}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = COLOURS[Grade.PASS if self.right else Grade.NOT_YET]
        return f'<div role="status" style="border-left:5px solid {colour};padding:.4em .8em">{escape(str(self))}</div>'


@dataclass(frozen=True, kw_only=True)
class Question:
    """One instance of a template.

    Attributes:
        text: what is asked, with its numbers; it can stand alone.
        why: the derivation, with the numbers.
        given: what was drawn, by name: all that the answer follows from.

    Raises:
        ValueError: the text asks nothing.
    """

    text: str
    why: str
    given: Mapping[str, Any]
    how: ClassVar[str]
    """What an answer looks like, in words."""

    def __post_init__(self) -> None:
        if not ASKS.search(self.text):
            raise ValueError(f"{self.text!r} asks nothing: a question has a question mark, or says what to do")

    @property
    def expected(self) -> str:
        """The right answer, as one would write it."""
        raise NotImplementedError

    @property
    def lettered(self) -> list[str]:
        """The options with their letters; none where nothing is to be chosen."""
        return []

    def grade(self, typed: str) -> Reply:
        """Judge an answer.

        Raises:
            UnreadableError: it is no answer; says what one looks like.
        """
        right, cause = self._judge(typed.strip())
        return Reply(right, self.expected, "" if right else cause, self.why, self.heard(typed))

    def heard(self, typed: str) -> str:
        """What of an answer was taken for it; empty where that is all of it."""
        return ""

    def quoted(self, typed: str) -> str:
        """An answer as a report quotes it."""
        return self.heard(typed) or typed.strip()

    def _judge(self, typed: str) -> tuple[bool, str]:
        raise NotImplementedError


@dataclass(frozen=True)
class Mistake:
    """A wrong number and why people arrive at it: "you forgot the backward all-gather", without a full stop."""

    value: float
    cause: str


@dataclass(frozen=True, kw_only=True)
class Number(Question):
    """A quantity.

    Attributes:
        unit: ``bytes``, ``s``, ``bytes/s``, ``FLOP/s``, ``%`` (100 is the whole), or the name of what is counted. The
            first five must be written, so that "7.9" for 7.9 GB is asked again.
        rel, abs_: how far off an answer may be. The default allows for rounding in the head, but not for GB in place of
            GiB.
    """

    answer: float
    unit: str
    mistakes: tuple[Mistake, ...] = ()
    rel: float = CLOSE
    abs_: float = 0.0
    how = "a number with its unit, such as 7.9 GB, 7.4 GiB, 3 ms, 45 GB/s, 40% or 1.1k tokens"

    @property
    def expected(self) -> str:
        return written(self.answer, self.unit)

    def _judge(self, typed: str) -> tuple[bool, str]:
        value, _ = self._read(typed)
        if self.accepts(value):
            return True, ""
        near = [m for m in self.mistakes if math.isclose(value, m.value, rel_tol=self.rel, abs_tol=self.abs_)]
        if near:
            return False, min(near, key=lambda m: abs(m.value - value)).cause
        if not self.answer:
            return False, ""
        factor = value / self.answer
        meant = unit_meant(factor, self.unit, close=self.rel) if not math.isclose(factor, 8, rel_tol=self.rel) else ""
        if meant:
            return False, f"the digits are right, and the unit would have to be {meant}"
        return False, slip(factor, self.unit, self.given, self.text)

    def heard(self, typed: str) -> str:
        return self._read(typed)[1]

    def _read(self, typed: str) -> tuple[float, str]:
        try:
            return number_in(typed, self.unit)
        except ValueError as error:
            raise UnreadableError(str(error)) from None

    def accepts(self, value: float) -> bool:
        """Whether a number in ``unit`` is close enough."""
        return math.isclose(value, self.answer, rel_tol=self.rel, abs_tol=self.abs_)


@dataclass(frozen=True, kw_only=True)
class Choice(Question):
    """One of several, by its letter. ``options`` are in the order in which they are shown.

    Attributes:
        wrong: the options that are wrong, each with the reason, without a full stop.
    """

    options: tuple[str, ...]
    wrong: Mapping[str, str]
    how = "the letter of one option"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.options) - len(self.wrong) != 1 or not set(self.wrong) < set(self.options):
            raise ValueError(f"one option of {self.options} must be right, {len(self.options) - len(self.wrong)} are")

    @property
    def lettered(self) -> list[str]:
        return with_letters(self.options)

    @property
    def answer(self) -> str:
        """The option that is right."""
        return next(option for option in self.options if option not in self.wrong)

    @property
    def expected(self) -> str:
        return f"{ascii_lowercase[self.options.index(self.answer)]}) {self.answer}"

    def _judge(self, typed: str) -> tuple[bool, str]:
        place = letters(typed, len(self.options), 1)[0]
        return self.options[place] == self.answer, self.wrong.get(self.options[place], "")

    def quoted(self, typed: str) -> str:
        return self.lettered[letters(typed, len(self.options), 1)[0]]


@dataclass(frozen=True, kw_only=True)
class Order(Question):
    """Things to be put in order, by their letters. ``options`` are in the order in which they are shown.

    Attributes:
        answer: the same things in the right order.
        because: for a thing, why it stands where it does: said of the first that is out of place.
    """

    options: tuple[str, ...]
    answer: tuple[str, ...]
    because: Mapping[str, str] = field(default_factory=dict)
    how = "the letters in order, such as b a c"

    def __post_init__(self) -> None:
        super().__post_init__()
        if sorted(self.options) != sorted(self.answer) or len(set(self.options)) < len(self.options):
            raise ValueError(
                f"the options {self.options} and the answer {self.answer} must be the same different things"
            )

    @property
    def lettered(self) -> list[str]:
        return with_letters(self.options)

    @property
    def expected(self) -> str:
        return " ".join(ascii_lowercase[self.options.index(thing)] for thing in self.answer)

    def _judge(self, typed: str) -> tuple[bool, str]:
        given = [self.options[place] for place in letters(typed, len(self.options), len(self.options))]
        for place, (right, found) in enumerate(zip(self.answer, given, strict=True), 1):
            if right != found:
                reason = self.because.get(right, "")
                return False, f"place {place} is “{right}”, not “{found}”{f': {reason}' if reason else ''}"
        return True, ""


def with_letters(options: Sequence[str]) -> list[str]:
    """``a) ...``, ``b) ...``."""
    return [f"{letter}) {option}" for letter, option in zip(ascii_lowercase, options, strict=False)]


def letters(typed: str, options: int, wanted: int) -> list[int]:
    """The places of the options that were typed as letters, which may be apart or together.

    Raises:
        UnreadableError: they are not ``wanted`` different letters of the options.
    """
    known = ascii_lowercase[:options]
    found = re.sub(r"[\s,;)>.-]+", "", typed.lower())
    if len(found) != wanted or len(set(found)) != wanted or not set(found) <= set(known):
        do = (
            f"each of the letters {known[0]} to {known[-1]} once, in your order"
            if wanted > 1
            else f"one letter, {known[0]} to {known[-1]}"
        )
        raise UnreadableError(
            f"{f'{typed.strip()[:40]!r} cannot be read' if found else 'Nothing was typed'}: type {do}"
        )
    return [known.index(letter) for letter in found]
