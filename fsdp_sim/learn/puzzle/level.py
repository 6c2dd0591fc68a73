"""`Level`: a step to put in order, one table in ``levels.toml``."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path

import msgspec

from fsdp_sim.words import nearest


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One level. Lists have an entry per unit, in the order of forward.

    Attributes:
        goal: one sentence: what is to be reached.
        start: the lines that there are, in the order in which the learner finds them.
        gather_ms, reduce_ms, all_reduce_ms, forward_ms, backward_ms: how long an operation of a unit takes.
        mib: size of a unit's whole parameters.
        communicators: 1 where all-gathers and reduce-scatters queue on one, 2 where each has its own.
        whole: how many units may be whole at once.
        goal_ms: the step time that wins.
        best_ms: the least that any order of these lines reaches (proven by a search in tests/learn/puzzle).
        hint: what to look at; no answer.
        won: what is said when it is won.
        torch: where torch decides this: a symbol of its source, as `fsdp_sim.learn.in_torch` names it.
        name: the table's.
    """

    title: str
    goal: str
    start: tuple[str, ...]
    gather_ms: tuple[float, ...]
    goal_ms: float
    best_ms: float
    hint: str
    won: str
    forward_ms: tuple[float, ...] = ()
    backward_ms: tuple[float, ...] = ()
    reduce_ms: tuple[float, ...] = ()
    all_reduce_ms: tuple[float, ...] = ()
    mib: tuple[int, ...] = ()
    communicators: int = 1
    whole: int | None = None
    torch: str = ""
    name: str = ""

    @property
    def compute(self) -> tuple[str, ...]:
        """The lines that compute; their order is the model's."""
        return tuple(line for line in self.start if line.startswith(("FWD", "BWD")))

    def reshards(self, unit: str) -> bool:
        """Whether the learner says when the whole parameters of a unit are freed; else they are after each use."""
        return f"RESHARD {unit}" in self.start


@functools.cache
def levels() -> dict[str, Level]:
    """All levels by name, in order."""
    tables = tomllib.loads((Path(__file__).parent / "levels.toml").read_text(encoding="utf-8"))
    return {name: msgspec.convert({"name": name} | table, Level) for name, table in tables.items()}


def load(name: str) -> Level:
    """A level by its name.

    Raises:
        ValueError: there is none; the message names the nearest.
    """
    if name not in levels():
        near = (nearest(str(name), levels()) or list(levels()))[0]
        raise ValueError(f"there is no level {name!r:.80}; did you mean {near!r}?")
    return levels()[name]
