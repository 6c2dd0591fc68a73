"""What was asked before, and when it should come again: spaced repetition by FSRS, in a file beside the progress.

A question that was missed comes back within minutes, one that was known after days, then weeks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import structs

from fsdp_sim.learn import kept

SLOW = 1.5
"""Times the seconds that an interviewer gives: a right answer that took longer comes back sooner."""


class _Card(msgspec.Struct, frozen=True):
    """FSRS's memory of a question: the fields of `fsrs.Card`."""

    card_id: int
    state: Literal[1, 2, 3]
    step: int | None
    stability: float | None
    difficulty: float | None
    due: Annotated[datetime, msgspec.Meta(tz=True)]
    last_review: Annotated[datetime, msgspec.Meta(tz=True)] | None


class QuestionRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of a question that was asked."""

    times: int
    right: int
    card: _Card
    overruled: dict[str, str] = {}
    """What one claims against the listener of a spoken question, by letters of points and numbers of follow-ups, with
    the reasons; what one gave back has a minus before it."""

    @property
    def due(self) -> datetime:
        """When it should come again."""
        return self.card.due


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


def note(
    name: str,
    *,
    right: bool,
    took_s: float,
    given_s: float,
    overruled: Mapping[str, str] | None = None,
    now: datetime | None = None,
) -> str:
    """Keep an answer, and set when the question comes again.

    Args:
        took_s, given_s: seconds that the answer took, and that an interviewer gives.
        overruled: what one claims against the listener or gives back, with the reasons.

    Returns:
        what went wrong, as a sentence; empty if nothing did.
    """
    from fsrs import Card, Rating, Scheduler

    rating = Rating.Again if not right else Rating.Hard if took_s > SLOW * given_s else Rating.Good

    def changed(held: _File) -> _File:
        before = held.questions.get(name)
        card = Card.from_dict(msgspec.to_builtins(before.card)) if before else Card()
        card, _ = Scheduler(enable_fuzzing=False).review_card(card, rating, now or datetime.now(UTC))
        times, known = (before.times, before.right) if before else (0, 0)
        claimed = {**(before.overruled if before else {}), **(overruled or {})}
        after = QuestionRecord(times + 1, known + right, msgspec.convert(card.to_dict(), _Card), claimed)
        return structs.replace(held, questions=dict(sorted({**held.questions, name: after}.items())))

    return kept.change(file(), _File, changed)
