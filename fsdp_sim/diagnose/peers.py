"""`Peers`: the same collective on the other ranks of its group, where their traces are at hand.

A collective is a rendezvous. Where its start is recorded when the last rank has come, those that came earlier show it
by the time between being ready and starting. Where it is recorded when a rank's own kernel starts (NCCL's kernels spin
until everybody is there), they show it by lasting longer than the same collective on the rank that came last.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isfinite
from typing import NamedTuple

from fsdp_sim.diagnose.cpu_stops import CpuStops
from fsdp_sim.diagnose.rank_view import RankView
from fsdp_sim.timeline import Event, Timeline, meetings


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

    def came_s(self, meeting: Sequence[Event], e: Event) -> float:
        """When a rank came to a collective.

        Where all begin at one moment, that is when the last had come, and each says by what it came after when it was
        ready itself.
        """
        view = self.view(e.rank)
        together = max(o.start_s for o in meeting) - min(o.start_s for o in meeting) <= view.touch_s
        if together and (view.simulated or view.on_cpu):
            ready_s = view.ready_s(e)
            return min(ready_s, e.start_s) if isfinite(ready_s) else e.start_s
        return e.start_s

    def group(self, e: Event) -> list[Event]:
        """The collective on all ranks of its group that the timeline has."""
        return self._meeting[e.rank, e.seq]

    @cached_property
    def meetings(self) -> list[list[Event]]:
        """Every collective, as the events of its ranks."""
        world = max(self.timeline.header.world_size, max(self.timeline.ranks) + 1)
        return meetings(self.timeline.ops, world, {unit.name: unit.apart for unit in self.timeline.header.units})

    @cached_property
    def _meeting(self) -> dict[tuple[int, int], list[Event]]:
        return {(e.rank, e.seq): events for events in self.meetings for e in events}
