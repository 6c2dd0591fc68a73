"""`QuestionResult`: one question of an interview and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdp_sim.learn.drill.listening.follow import Conversation


@dataclass(frozen=True)
class QuestionResult:
    """One question and what became of it.

    Attributes:
        typed: the answer; empty if one did not know.
        cause: why people answer so, where known.
        trouble: what went wrong when it was kept.
        talk: what was said, if it was a spoken one.
    """

    name: str
    topic: str
    level: int
    right: bool
    took_s: float
    given_s: float
    section: str
    typed: str = ""
    cause: str = ""
    trouble: str = ""
    talk: Conversation | None = None

    @property
    def read(self) -> str:
        """Where to read on."""
        return f"See {place(self.section)}."


def place(section: str) -> str:
    """``08.5`` in words: ``notebook 08, section 5``."""
    chapter, _, number = section.partition(".")
    return f"notebook {chapter}, section {number}"
