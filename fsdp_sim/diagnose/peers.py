"""`Peers`: the same collective on the other ranks of its group, where their traces are at hand.

A collective is a rendezvous. Where its start is recorded when the last rank has come, those that came earlier show it
by the time between being ready and starting. Where it is recorded when a rank's own kernel starts (NCCL's kernels spin
until everybody is there), they show it by lasting longer than the same collective on the rank that came last.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from math import isfinite
from typing import NamedTuple

from fsdp_sim.diagnose.cpu_stops import CpuStops
from fsdp_sim.diagnose.rank_view import RankView
from fsdp_sim.timeline import COLLECTIVES, Event, Op, Timeline, group_number

Key = tuple[Op, str, int, int, str]


class Lateness(NamedTuple):
    """How long a rank waited in a collective for the last one of its group, and that one's event; None if not known."""

    seconds: float
    event: Event | None


class Peers:
    """All ranks of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._views: dict[int, RankView] = {}
        self._stops: dict[int, CpuStops] = {}

    @property
    def several(self) -> bool:
        return len(self.timeline.ranks) > 1

    def view(self, rank: int) -> RankView:
        if rank not in self._views:
            self._views[rank] = RankView(self.timeline, rank)
        return self._views[rank]

    def stops(self, rank: int) -> CpuStops:
        if rank not in self._stops:
            self._stops[rank] = CpuStops(self.view(rank))
        return self._stops[rank]

    def lateness(self, e: Event) -> Lateness:
        """How long a rank waited in a collective for the last one to come to it."""
        simulated = self.timeline.header.clock == "simulated"
        own_s = self.view(e.rank).ready_s(e)
        group = self.group(e) if self.several else [e]
        if len(group) < 2:  # only a simulated timeline says all that this rank itself had to wait for
            return Lateness(max(0.0, e.start_s - own_s) if simulated and isfinite(own_s) else 0.0, None)
        last = max(group, key=lambda peer: self.view(peer.rank).ready_s(peer))
        until_s = min(e.start_s, self.view(last.rank).ready_s(last))
        before_s = max(0.0, until_s - own_s) if isfinite(own_s) else 0.0
        quickest = min(group, key=lambda peer: peer.duration_s)
        within_s = 0.0 if simulated else e.duration_s - quickest.duration_s
        return Lateness(before_s + within_s, last if before_s >= within_s else quickest)

    def group(self, e: Event) -> list[Event]:
        """The collective on all ranks of its group that the timeline has."""
        found: list[Event] = []
        place = self._places[e.rank, e.seq]
        size = max(1, e.group_size)
        world = max(self.timeline.header.world_size, max(self.timeline.ranks) + 1)
        apart = 1 if e.op is Op.ALL_TO_ALL else self._apart.get(e.unit, 1)
        own = group_number(e.op, e.rank, size, world, apart)
        for rank, events in self._occurrences[_key(e)].items():
            if group_number(e.op, rank, size, world, apart) == own and place < len(events):
                found.append(events[place])
        return found

    @cached_property
    def _apart(self) -> dict[str, int]:
        return {unit.name: unit.apart for unit in self.timeline.header.units}

    @cached_property
    def _occurrences(self) -> dict[Key, dict[int, list[Event]]]:
        found: dict[Key, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
        for e in self.timeline.ops:
            if e.op in COLLECTIVES:
                found[_key(e)][e.rank].append(e)
        return found

    @cached_property
    def _places(self) -> dict[tuple[int, int], int]:
        return {
            (rank, e.seq): place
            for ranks in self._occurrences.values()
            for rank, events in ranks.items()
            for place, e in enumerate(events)
        }


def _key(e: Event) -> Key:
    """What is the same for a collective on every rank of its group."""
    return e.op, e.unit, e.step, e.micro_batch, str(e.phase)
