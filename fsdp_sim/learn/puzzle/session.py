"""`PuzzleSession`: a learner at one level. It takes messages, from a widget or a page alike, and says what to draw.

A message carries an order or a button and never a result: what is won is what `replay` makes of the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from fsdp_sim.learn.puzzle.level import Level, levels, load
from fsdp_sim.learn.puzzle.replayed import SAME_S, Replayed, ms, replay
from fsdp_sim.words import human_bytes

LANES = {
    "compute": "compute",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
}
NAMES = {
    "AG": "all-gather", "RS": "reduce-scatter", "AR": "all-reduce", "FWD": "forward", "BWD": "backward",
    "RESHARD": "reshard",
}  # fmt: skip


class PuzzleMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a learner does: an order, a button, or another level."""

    order: list[str] | None = None
    button: Literal["undo", "reset", "hint", "next"] | None = None
    level: str | None = None


@dataclass(frozen=True)
class PuzzleRecord:
    """What a session knows of a learner, and of torch.

    Attributes:
        stars: of the levels that were won.
        keep: the stars of a level; answers what went wrong, empty if nothing did.
        in_torch: name and address of a symbol of torch's source; None if it is not there.
    """

    stars: Callable[[], dict[str, int]]
    keep: Callable[[str, int], str]
    in_torch: Callable[[str], dict[str, str] | None]


def of_the_learner() -> PuzzleRecord:
    """Of the learner's file of progress, and of the torch that is installed."""
    from fsdp_sim.learn import progress  # which a page in a browser does not have
    from fsdp_sim.learn.in_torch import counterpart

    def in_torch(symbol: str) -> dict[str, str] | None:
        found = counterpart(symbol)
        return {"name": found.name, "url": found.url} if found else None

    return PuzzleRecord(progress.puzzles, progress.keep_puzzle, in_torch)


def first_unwon(record: PuzzleRecord | None = None) -> str:
    """The first level without a star; the last one where all have."""
    won = (record or of_the_learner()).stars()
    return next((name for name in levels() if not won.get(name)), list(levels())[-1])


class PuzzleSession:
    """Where a learner stands in a level: the last legal order, and those before it."""

    def __init__(self, name: str, record: PuzzleRecord | None = None) -> None:
        self.record = record or of_the_learner()
        self.open(name)

    def open(self, name: str) -> None:
        self.level: Level = load(name)
        self.played: Replayed = replay(self.level, self.level.start)
        self.before: list[Replayed] = []
        self.refused = self.hint = self.trouble = ""

    def play(self, order: list[str] | tuple[str, ...]) -> None:
        """Play an order; what is not legal leaves all as it is, with a sentence."""
        self.refused = ""
        try:
            played = replay(self.level, order)
        except ValueError as error:
            self.refused = sentence(str(error))
            return
        if played.order != self.played.order:
            self.before.append(self.played)
        self.played = played
        if played.stars:
            self.trouble = self.record.keep(self.level.name, played.stars)

    def take(self, message: object) -> dict[str, Any]:
        """Do what a message says; returns what to draw."""
        try:
            asked = msgspec.convert(message, PuzzleMessage)
            if asked.level is not None:
                self.open(asked.level)
            if asked.order is not None:
                self.play(asked.order)
            if asked.button:
                getattr(self, f"_{asked.button}")()
        except ValueError as error:  # of msgspec too
            self.refused = sentence(f"this message is not understood: {error}")
        return self.state

    def _undo(self) -> None:
        self.refused = ""
        if self.before:
            self.played = self.before.pop()

    def _reset(self) -> None:
        self.open(self.level.name)

    def _hint(self) -> None:
        self.hint = self.level.hint

    def _next(self) -> None:
        names = list(levels())
        self.open(names[(names.index(self.level.name) + 1) % len(names)])

    @property
    def state(self) -> dict[str, Any]:
        """All that the front end draws."""
        level, played = self.level, self.played
        names, won = list(levels()), self.record.stars()
        link = self.record.in_torch(level.torch) if level.torch and played.stars else None
        spans = played.timeline.ops
        return {
            "level": level.name,
            "levels": [{"name": name, "title": levels()[name].title, "stars": won.get(name, 0)} for name in names],
            "title": level.title,
            "goal": level.goal,
            "step_ms": round(1e3 * played.step_s, 3),
            "goal_ms": level.goal_ms,
            "best_ms": level.best_ms,
            "until_ms": max(replay(level, level.start).step_s * 1e3, 1e3 * played.step_s),
            "whole": played.whole,
            "whole_limit": level.whole,
            "memory": human_bytes(played.peak_bytes),
            "exposed": ms(played.exposed_s),
            "fits": played.fits,
            "stars": played.stars,
            "said": played.said,
            "waits": sentence(played.waits),
            "refused": self.refused,
            "hint": self.hint,
            "trouble": self.trouble,
            "torch": link,
            "can_undo": bool(self.before),
            "lines": [_line(played, number, line) for number, line in enumerate(played.order)],
            "lanes": [name for lane, name in LANES.items() if any(e.lane == lane for e in spans)],
            "units": [
                {
                    "name": f"unit {n}",
                    "spans": [[1e3 * a, 1e3 * b] for u, a, b in played.whole_spans if u == f"unit {n}"],
                }
                for n in range(len(level.gather_ms))
            ],
        }


def _line(played: Replayed, number: int, line: str) -> dict[str, Any]:
    kind, _, unit = line.partition(" ")
    event = played.events.get(number)
    found = {"text": line, "kind": kind, "unit": int(unit), "name": f"{NAMES[kind]} of unit {unit}"}
    found |= {"moves": kind not in ("FWD", "BWD"), "idle": number in played.idle}
    if event is not None:
        found |= {"lane": LANES[str(event.lane)], "start_ms": 1e3 * event.start_s, "end_ms": 1e3 * event.end_s}
        found["issue_ms"] = 1e3 * event.issue_s
        found["late"] = event.start_s > event.issue_s + SAME_S
    return found


def sentence(text: str) -> str:
    """With a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")
