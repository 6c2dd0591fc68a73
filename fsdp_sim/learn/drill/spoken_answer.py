"""``spoken(name)``: a question to be answered aloud, in a notebook; what a strong answer contains is folded."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from fsdp_sim.learn.drill.ask import question_html
from fsdp_sim.learn.drill.question import with_letters
from fsdp_sim.learn.drill.spoken import SpokenQuestion
from fsdp_sim.learn.drill.spoken import spoken as known
from fsdp_sim.words import nearest


@dataclass(frozen=True, repr=False)
class SpokenAnswer:
    """A spoken question: the points, the number and the follow-ups are shown as text, and folded as HTML."""

    source: SpokenQuestion
    seed: int = 0

    @property
    def _parts(self) -> list[tuple[str, list[str]]]:
        number = self.source.example(self.seed)
        return [
            ("What a strong answer says", with_letters(self.source.points)),
            *([("The number it comes with", [number])] if number else []),
            *((f"Then: {step.question}", [step.strong]) for step in self.source.ladder),
        ]

    def __str__(self) -> str:
        lines = [f"{self.source.question} ({self.source.seconds} s, aloud)"]
        for heading, points in self._parts:
            lines += ["", heading, *(f"  {line}" for line in points)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        folded = ""
        for heading, points in self._parts:
            lines = "<br>".join(map(escape, points))
            folded += f"<details><summary>{escape(heading)}</summary><p>{lines}</p></details>"
        return f"{question_html(self.source.question, [], f'{self.source.seconds} seconds, aloud.')}{folded}"


def spoken(name: str) -> SpokenAnswer:
    """A question to be answered aloud.

    Raises:
        ValueError: there is no such question; the message names the nearest.
    """
    if name not in known():
        near = nearest(name, known()) or list(known())[:1]
        raise ValueError(f"there is no spoken question {name!r}; did you mean {near[0]!r}?")
    return SpokenAnswer(known()[name])
