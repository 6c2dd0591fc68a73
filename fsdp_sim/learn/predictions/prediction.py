"""What a prediction asks: one table in ``<chapter>.toml``, beside this file. `Committed` is an answer to it, judged."""

from __future__ import annotations

import functools
import math
import re
import textwrap
import tomllib
from pathlib import Path

import msgspec

from fsdp_sim.learn.corrected import corrected
from fsdp_sim.learn.numerals import in_digits
from fsdp_sim.learn.quantity import MAX_LENGTH, in_unit, needs_unit, written
from fsdp_sim.words import nearest

CLOSE = 0.2  # relative: so far an estimate may be off and still count as close
WIDTH = 88  # characters to a line of text
FOLDER = Path(__file__).parent


class Prediction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question.

    Attributes:
        question: one or two sentences, markdown.
        answer: what happens: one of ``choices``, or a quantity with its unit, such as ``2.0 GB``.
        why: the sentences that one reads after committing.
        choices: to choose from; none if a quantity is asked for.
        unit: of the quantity: ``bytes``, ``s``, ``%``, or the name of what is counted.
        name: the table's.
        file: the notebook in which it is asked, after which the file of the table is named.
    """

    question: str
    answer: str
    why: str
    choices: tuple[str, ...] = ()
    unit: str = ""
    name: str = ""
    file: str = ""

    def __post_init__(self) -> None:
        if self.choices:
            if self.unit or len(set(self.choices)) != len(self.choices) or len(self.choices) < 2:
                raise ValueError(f"prediction {self.name}: two or more different choices, and no unit")
            if self.answer not in self.choices:
                raise ValueError(f"prediction {self.name}: the answer {self.answer!r} is none of its choices")
        elif not self.unit or self.value(self.answer) == 0:
            raise ValueError(f"prediction {self.name}: it needs choices, or a unit and an answer that is not zero")

    def value(self, text: str) -> float:
        """A quantity in the unit of the prediction.

        Raises:
            ValueError: it cannot be read, or has no unit where one is needed.
        """
        if needs_unit(self.unit) and re.fullmatch(r"[\s\d.,_+-]*", text):
            raise ValueError(f"{text[:MAX_LENGTH]!r} of what? Answer with a unit, as in {self._example!r}")
        return float(in_unit(corrected(in_digits(text)), self.unit))

    @property
    def _example(self) -> str:
        """A quantity that does not give the answer away."""
        return written({"bytes": 10e9, "s": 10e-3}.get(self.unit, 10.0), self.unit)

    @property
    def how(self) -> str:
        """How to answer: the choices, a line each, or a sentence. JupyterLab breaks longer lines in mid-word."""
        if self.choices:
            return "\n".join(
                textwrap.fill(f"({n}) {choice}", WIDTH, subsequent_indent="    ")
                for n, choice in enumerate(self.choices, 1)
            )
        return f"A number with a unit, such as {self._example}" if needs_unit(self.unit) else f"A number of {self.unit}"

    def commit(self, text: str) -> Committed:
        """An answer, judged.

        Raises:
            ValueError: it is none of the choices, or no quantity; says what would be.
        """
        text = text.strip()
        if not self.choices:
            ratio = self.value(text) / self.value(self.answer)
            return Committed(self, written(self.value(text), self.unit), abs(ratio - 1) <= CLOSE, ratio)
        number = int(text) - 1 if text.isdecimal() and text not in self.choices else -1
        by_text = {_plain(choice): choice for choice in self.choices}
        choice = self.choices[number] if 0 <= number < len(self.choices) else by_text.get(_plain(text))
        if choice is None:
            raise ValueError(
                f"{text[:MAX_LENGTH]!r} is none of the choices; answer with a number from 1 to {len(self.choices)}"
            )
        return Committed(self, choice, choice == self.answer)


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", text.lower().replace("×", "x"))


class Committed(msgspec.Struct, frozen=True):
    """An answer that was given.

    Attributes:
        right: it is the right choice, or close.
        ratio: of a quantity, the answer over the truth.
    """

    to: Prediction
    answer: str
    right: bool
    ratio: float | None = None

    @property
    def sentence(self) -> str:
        """The difference, in one sentence."""
        if self.ratio is None:
            return f"{self.answer}: right." if self.right else f"You said “{self.answer}”; it is “{self.to.answer}”."
        if abs(self.ratio - 1) < 0.005:
            return f"You said {self.answer}, and so it is."
        return f"You said {self.answer}; it is {self.to.answer}: {off(self.ratio)}."


def off(ratio: float) -> str:
    """How far an estimate is off, given the estimate over the truth."""
    if ratio <= 0:
        return "another sign"
    if 0.5 < ratio < 2:
        return f"your estimate is {abs(ratio - 1):.0%} too {'high' if ratio > 1 else 'low'}"
    factor = max(ratio, 1 / ratio)
    digits = f"{factor:.0f}" if factor >= 10 or math.isclose(factor, round(factor)) else f"{factor:.1f}"
    return f"your estimate is {digits} times too {'high' if ratio > 1 else 'low'}"


@functools.cache
def names() -> dict[str, Prediction]:
    """All predictions by name, in the order of the course.

    Raises:
        ValueError: two have the same name, or one is not as it should be.
    """
    found: dict[str, Prediction] = {}
    for file in sorted(FOLDER.glob("*.toml")):
        for name, table in tomllib.loads(file.read_text(encoding="utf-8")).items():
            if name in found:
                raise ValueError(f"there are two predictions {name!r}; rename the one in {file.name}")
            found[name] = msgspec.convert({"name": name, "file": file.stem} | table, Prediction)
    return found


def load(name: str) -> Prediction:
    """A prediction by its name.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    if name not in names():
        near = (nearest(name, names()) or list(names()))[:1]
        raise ValueError(f"there is no prediction {name!r}; did you mean {near[0]!r}?")
    return names()[name]
