"""`Verdict`: the answer to a solution, as text and as HTML."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from html import escape
from typing import Any

CODE = re.compile(r"`([^`]+)`")
SHOWN = 2000  # characters of what the code printed; the middle of more is cut


class Grade(IntEnum):
    """How good a solution is. Exercises without targets know only the first two."""

    NOT_YET = 0
    PASS = 1
    GOOD = 2
    OPTIMAL = 3


WORDS = {
    Grade.NOT_YET: "✗ Not yet",
    Grade.PASS: "✓ Right",
    Grade.GOOD: "✓ Right, good",
    Grade.OPTIMAL: "★ Right, optimal",
}
COLOURS = {Grade.NOT_YET: "#D55E00", Grade.PASS: "#009E73", Grade.GOOD: "#009E73", Grade.OPTIMAL: "#0072B2"}


@dataclass(frozen=True)
class Finding:
    """What a judge has found: a grade and one paragraph.

    Attributes:
        message: what was expected and what was found, as anybody could observe it.
        cause: the rest of the paragraph, which tells why, or what to do about it. Of a seeded fault it is not shown
            before one has tried to mend it, or has named a cause.
    """

    grade: Grade
    message: str
    cause: str = ""

    @property
    def whole(self) -> str:
        """The paragraph."""
        return f"{self.message}{self.cause}"

    @property
    def symptom(self) -> str:
        """The paragraph without the cause."""
        return self.message if self.message.endswith((".", "?", "!")) else f"{self.message}."


class Use:
    """A function to go on with, whatever became of the exercise: it is called like the function itself."""

    def __init__(self, function: Callable[..., Any], whose: str) -> None:
        self.function, self.whose = function, whose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            inspect.signature(self.function).bind(*args, **kwargs)
        except TypeError as error:  # a cell further up is run again: `checked` is that of another exercise by now
            name = getattr(self.function, "__name__", "another function")
            raise TypeError(
                f"{name} was checked last, and it is not called so ({error}); run the check above this cell again"
            ) from None
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.whose} {getattr(self.function, '__name__', 'function')}>"


@dataclass(frozen=True, repr=False)
class Verdict:
    """The answer to a solution. Shown in a notebook with a coloured edge and a sign, in a terminal as text.

    Attributes:
        message: one paragraph: what was expected, what was found on which rank, and the cause.
        use: the solution if it passed, else the reference; its repr says which. The rest of a notebook goes on with it.
        printed: what the solution printed.
    """

    exercise: str
    grade: Grade
    message: str
    use: Use
    printed: str = ""

    @property
    def passed(self) -> bool:
        return self.grade > Grade.NOT_YET

    def __str__(self) -> str:
        printed = f"\nIt printed:\n{_cut(self.printed)}" if self.printed.strip() else ""
        return f"{WORDS[self.grade]}: {self.message}{printed}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        printed = f"<details><summary>It printed</summary><pre>{escape(_cut(self.printed))}</pre></details>"
        return (
            f'<div role="status" style="border-left:5px solid {COLOURS[self.grade]};padding:.4em .8em">'
            f"<b>{WORDS[self.grade]}:</b> {with_code(self.message)}{printed if self.printed.strip() else ''}</div>"
        )


def with_code(text: str) -> str:
    """Text as HTML; what stands between backticks is code."""
    return CODE.sub(r"<code>\1</code>", escape(text))


def _cut(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    half = SHOWN // 2
    return f"{text[:half]}\n... {len(text) - SHOWN:,} characters cut ...\n{text[-half:]}"
