"""`Side`: one step as one rank saw it, and what each unit took of it; a comparison has two."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from fsdp_sim.timeline.analysis import (
    Interval,
    busy_s,
    communicates,
    computes,
    in_turn,
    spans_of,
    subtract,
    total_s,
    uncovered,
    union,
)
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import Op
from fsdp_sim.timeline.timeline import Timeline

Key = tuple[Op, str, int, int]


class UnitTimes(NamedTuple):
    """What one unit took of a step. Of operations that overlap on the compute lane, time counts once.

    Attributes:
        start_s: when its first operation starts, from the start of the step.
        compute_s: the compute lane worked for it.
        comm_s: its communication, overlapping or not.
        exposed_s: of that, what no compute hid; of two collectives in flight the one that started first counts.
    """

    start_s: float
    compute_s: float
    comm_s: float
    exposed_s: float


@dataclass(frozen=True)
class Side:
    """One step of one timeline as one rank saw it."""

    timeline: Timeline
    step: int
    rank: int

    @cached_property
    def ops(self) -> tuple[Event, ...]:
        """The rank's operations of the step in issue order."""
        return tuple(e for e in self.timeline.ops if e.step == self.step and e.rank == self.rank)

    @cached_property
    def _span(self) -> Interval:
        of_step = [e for e in self.timeline.ops if e.step == self.step]
        return min(e.start_s for e in of_step), max(e.end_s for e in of_step)

    @property
    def origin_s(self) -> float:
        """When any rank starts the first operation of the step."""
        return self._span[0]

    @property
    def step_s(self) -> float:
        """Until any rank ends the last."""
        return self._span[1] - self._span[0]

    def since_s(self, event: Event) -> float:
        """When an operation starts, from the start of the step."""
        return event.start_s - self.origin_s

    @cached_property
    def keyed(self) -> dict[Key, Event]:
        """The operations by what they are and their occurrence, in issue order."""
        seen: Counter[tuple[Op, str, int]] = Counter()
        found: dict[Key, Event] = {}
        for event in self.ops:
            what = (event.op, event.unit, event.micro_batch)
            found[*what, seen[what]] = event
            seen[what] += 1
        return found

    @cached_property
    def exposed(self) -> list[Interval]:
        """When the rank communicated and did not compute."""
        return subtract(spans_of(self._communicating), spans_of(self._computing))

    @cached_property
    def compute_s(self) -> float:
        return busy_s(self._computing)

    @cached_property
    def comm_s(self) -> float:
        return total_s(union(spans_of(self._communicating)))

    @cached_property
    def exposed_s(self) -> float:
        return total_s(self.exposed)

    @property
    def idle_s(self) -> float:
        """The rank neither computes nor communicates: it waits for its CPU, for another rank, or copies elsewhere."""
        return self.step_s - self.compute_s - self.exposed_s

    @cached_property
    def units(self) -> dict[str, UnitTimes]:
        """What each unit took, in the order in which they first compute; compute and exposed sum to the rank's own."""
        in_time = sorted(self.ops, key=lambda e: (e.start_s, e.seq))
        first = {e.unit: self.since_s(e) for e in reversed(in_time)}
        order = dict.fromkeys([e.unit for e in in_time if computes(e.op, e.lane)] + [e.unit for e in in_time])
        times = {unit: [first[unit], 0.0, 0.0, 0.0] for unit in order}
        for event, own in in_turn(self._computing):
            times[event.unit][1] += own[1] - own[0] - event.unlaunched_s
        busy = union(spans_of(self._computing))
        for event in self._communicating:
            times[event.unit][2] += event.duration_s
        for event, own in in_turn(self._communicating):
            times[event.unit][3] += total_s(uncovered(*own, busy))
        return {unit: UnitTimes(*values) for unit, values in times.items()}

    @cached_property
    def _computing(self) -> list[Event]:
        return [e for e in self.ops if computes(e.op, e.lane)]

    @cached_property
    def _communicating(self) -> list[Event]:
        return [e for e in self.ops if communicates(e.op, e.lane)]
