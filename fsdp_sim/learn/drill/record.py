"""What was asked before, and when it should come again: spaced repetition by FSRS, in a file beside the progress.

A question that was missed comes back within minutes, one that was known after days, then weeks.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from fsdp_sim.learn import kept

SLOW = 1.5
"""Times the seconds that an interviewer gives: a right answer that took longer comes back sooner."""


class QuestionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of a question.

    Attributes:
        card: FSRS's memory of it, as `fsrs.Card.to_dict` writes it.
    """

    times: int = 0
    right: int = 0
    card: dict[str, Any] = {}

    @property
    def due(self) -> datetime:
        """When it should come again."""
        return datetime.fromisoformat(self.card["due"])


class _File(msgspec.Struct):
    questions: dict[str, QuestionRecord] = {}


def file() -> Path:
    """Where it is kept."""
    path = kept.path()
    return path.with_name(f"{path.stem}-drills.json")


def read() -> dict[str, QuestionRecord]:
    """What is kept, by the names of questions."""
    return kept.read(file(), _File).questions


def due(among: Iterable[str], now: datetime | None = None) -> list[str]:
    """Those that should come again by now, the longest overdue first."""
    known, at = read(), now or datetime.now(UTC)
    waiting = [name for name in among if name in known and known[name].due <= at]
    return sorted(waiting, key=lambda name: known[name].due)


def note(name: str, *, right: bool, took_s: float, given_s: float, now: datetime | None = None) -> str:
    """Keep an answer, and set when the question comes again.

    Args:
        took_s, given_s: seconds that the answer took, and that an interviewer gives.

    Returns:
        what went wrong, as a sentence; empty if nothing did.
    """
    from fsrs import Card, Rating, Scheduler

    rating = Rating.Again if not right else Rating.Hard if took_s > SLOW * given_s else Rating.Good

    def changed(held: _File) -> _File:
        before = held.questions.get(name, QuestionRecord())
        card = Card.from_dict(before.card) if before.card else Card()  # type: ignore[arg-type]
        card, _ = Scheduler(enable_fuzzing=False).review_card(card, rating, now or datetime.now(UTC))
        after = QuestionRecord(before.times + 1, before.right + right, dict(card.to_dict()))
        return structs.replace(held, questions=dict(sorted({**held.questions, name: after}.items())))

    return kept.change(file(), _File, changed)
