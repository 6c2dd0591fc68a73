"""What is alive on a rank at one moment, by category and unit, of a simulation or of any timeline with memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from fsdp_sim.requests import does_not_fit, on_the_edge
from fsdp_sim.simulation import Fit, Simulation
from fsdp_sim.timeline import Event, Memory, Op, Phase, Timeline
from fsdp_sim.viz.theme import MEMORY
from fsdp_sim.words import human_bytes

WHY: dict[Fit, Callable[[Simulation], str]] = {
    Fit.FITS: lambda sim: "", Fit.EDGE: on_the_edge, Fit.DOES_NOT_FIT: does_not_fit
}  # fmt: skip
PHASES = {str(phase): phase for phase in Phase if phase is not Phase.NONE}


class AlivePart(NamedTuple):
    category: Memory
    unit: str
    bytes: int


@dataclass(frozen=True)
class AliveBars:
    """What is alive at one moment.

    Attributes:
        what: the moment in a word or two.
        during: the operation that the moment falls into, as its event; None where there is none.
        limit_bytes: what the device has; 0 where that is not known.
        parts: by category and unit, in issue order.
        fit: whether it fits: at the peak of a simulation the simulation's own answer, else whether this is within the
            limit.
        why: of a simulation that does not plainly fit, the sentence that says why.
    """

    what: str
    rank: int
    during: Event | None
    limit_bytes: int
    parts: tuple[AlivePart, ...]
    fit: Fit = Fit.FITS
    why: str = ""

    @cached_property
    def total_bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def too_much_bytes(self) -> int:
        """How much of it the device does not have."""
        return max(0, self.total_bytes - self.limit_bytes) if self.limit_bytes else 0

    @property
    def verdict(self) -> str:
        """What is wrong, in words; empty where it fits."""
        if self.too_much_bytes:
            return f"{human_bytes(self.too_much_bytes)} too much"
        return "" if self.fit is Fit.FITS else str(self.fit)

    @cached_property
    def by_category(self) -> dict[Memory, list[AlivePart]]:
        """The parts of each category that occurs, in the order of the memory strip."""
        found = {category: [p for p in self.parts if p.category is category] for category in MEMORY}
        return {category: parts for category, parts in found.items() if parts}


def alive_at(of: Simulation | Timeline, name: str, moment: str | float, rank: int | None) -> AliveBars:
    """What is alive at a moment, counted in issue order as the caching allocator does.

    Args:
        name: for messages.
        moment: ``peak``, a phase for the peak in it, or seconds since the first operation started (then in the order
            in which the device gets there).

    Raises:
        ValueError: there is no such rank, no memory, or nothing of that phase.
    """
    timeline = of.timeline if isinstance(of, Simulation) else of
    if rank is None:
        rank = timeline.ranks[0] if timeline.ranks else 0
    elif rank not in timeline.ranks:
        raise ValueError(f"rank {rank} is not in {name!r}; it has ranks {list(timeline.ranks)}")
    events = [e for e in timeline.events if e.rank == rank]
    if not any(e.is_memory for e in events):
        raise ValueError(
            f"rank {rank} of {name!r} recorded no memory; a simulation's timeline has it, and so has a run recorded "
            "with memory"
        )
    if isinstance(moment, (int, float)):
        at_s = timeline.start_s + moment
        until = [e for e in sorted(events, key=lambda e: (e.start_s, e.seq)) if e.start_s <= at_s]
        running = [e for e in until if not e.is_memory and e.end_s > at_s]
        return _made("that moment", rank, running[0] if running else None, timeline, until)
    if moment != "peak" and moment not in PHASES:
        raise ValueError(f"moment is {moment!r}; it must be peak, {', '.join(PHASES)}, or seconds")
    last = _peak(events, PHASES.get(moment))
    if last is None:
        raise ValueError(f"rank {rank} of {name!r} has no memory event in {moment}; ask for the peak")
    during = next((e for e in events[last:] if not e.is_memory), None)
    what = "the peak" if moment == "peak" else f"the peak of {moment}"
    found = _made(what, rank, during, timeline, events[: last + 1])
    if isinstance(of, Simulation) and moment == "peak":
        found = replace(found, fit=of.fit, why=WHY[of.fit](of))
    return found


def _peak(events: list[Event], phase: Phase | None) -> int | None:
    """The place of the first event after which most is alive, of those of a phase."""
    best, found, live = -1, None, 0
    for place, e in enumerate(events):
        if e.is_memory:
            live += e.bytes if e.op is Op.ALLOC else -e.bytes
            if live > best and (phase is None or e.phase is phase):
                best, found = live, place
    return found


def _made(what: str, rank: int, during: Event | None, timeline: Timeline, events: list[Event]) -> AliveBars:
    live: dict[tuple[Memory, str], int] = {}
    for e in events:
        if e.is_memory:
            key = (e.category, e.unit)
            live[key] = live.get(key, 0) + (e.bytes if e.op is Op.ALLOC else -e.bytes)
    parts = tuple(AlivePart(category, unit, n_bytes) for (category, unit), n_bytes in live.items() if n_bytes > 0)
    found = AliveBars(what, rank, during, timeline.header.memory_limit_bytes, parts)
    return replace(found, fit=Fit.DOES_NOT_FIT) if found.too_much_bytes else found
