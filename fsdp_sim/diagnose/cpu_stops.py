"""`CpuStops`: where the CPU of a rank stood still before it went on to issue, and what for.

A timeline does not record that a CPU waits; it shows as a pause between two issues that ends as the device finishes
something. FSDP1's rate limiter waits for the unit before the last, so compute of the last is queued meanwhile; a host
sync waits until nothing is queued; a CPU that is merely slow does not go on because something has ended.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from fsdp_sim.diagnose.rank_view import RankView
from fsdp_sim.timeline import MEMORY, Event, Op, computes

_GATHERING = frozenset({Op.ALL_GATHER, Op.AG_CAST, Op.AG_COPY_IN, Op.H2D})  # what the limiter holds back
_LOOK_BACK = 400  # events before one, among which the CPU's last stop is looked for
_QUEUE = 60  # operations before one, among which compute may still be queued


class CpuStop(NamedTuple):
    """A pause of the CPU.

    Attributes:
        since_s: when it issued the event before.
        until_s: when the compute ended that it may have waited for.
        issue_s: when it issued the next event.
        number: of that event.
    """

    since_s: float
    until_s: float
    issue_s: float
    number: int


class CpuStops:
    """The pauses of a rank's CPU."""

    def __init__(self, view: RankView) -> None:
        self.view = view

    def _number(self, e: Event) -> int:
        """The place of an operation among all events."""
        return bisect_right(self.view.issued[0], e.seq) - 1

    @cached_property
    def _place(self) -> dict[int, int]:
        return {e.seq: k for k, e in enumerate(self.view.ops)}

    def limited(self, e: Event) -> bool:
        """Whether the rate limiter held the CPU back before it issued this."""
        stop = self._last(e) if self.view.api == "fsdp1" and not self.view.on_cpu else None
        if stop is None:
            return False
        issued = self.view.issued[1][stop.number : self._number(e) + 1]
        if next((op for op in issued if op not in MEMORY), None) not in _GATHERING:
            return False
        return self._queued(e, stop) or stop.issue_s - stop.until_s <= self.view.touch_s

    def synchronised(self, e: Event) -> bool:
        """Whether the CPU, before it issued this, waited until the device had done all that was issued."""
        stop = self._last(e)
        if stop is None or self._queued(e, stop) or self._launched(stop):
            return False
        pause_s = stop.issue_s - stop.since_s
        return stop.issue_s - stop.until_s <= 0.2 * pause_s and pause_s >= 5 * self._usual_s

    def _last(self, e: Event) -> CpuStop | None:
        """The last stop before the CPU issued an operation, if that was longer than what it has done since."""
        issued_s, last = self.view.issued[2], self._number(e)
        for k in range(last, max(0, last - _LOOK_BACK), -1):
            since_s, issue_s = issued_s[k - 1], issued_s[k]
            if issue_s <= since_s:
                continue
            place = bisect_right(self._ends, issue_s + self.view.touch_s) - 1
            end_s = self._ends[place] if place >= 0 else float("-inf")
            if end_s > since_s and end_s - since_s >= e.issue_s - end_s:
                return CpuStop(since_s, min(end_s, issue_s), issue_s, k)
        return None

    def _launched(self, stop: CpuStop) -> bool:
        """Whether the CPU had kernels to launch meanwhile, of what it issued before: the device stood idle for them."""
        seq = next((s for s in reversed(self.view.issued[0][: stop.number]) if s in self._place), None)
        if seq is None:
            return False
        before = self.view.ops[self._place[seq]]
        least_s = 0.0 if self.view.simulated else (stop.issue_s - stop.since_s) / 2
        return before.unlaunched_s > least_s

    def _queued(self, e: Event, stop: CpuStop) -> bool:
        """Whether compute that was issued before a stop had not ended after it."""
        place = self._place[e.seq]
        since_s, until_s, some = stop.since_s, stop.until_s, self.view.ops[max(0, place - _QUEUE) : place]
        late = [op for op in some if op.end_s > until_s and op.issue_s <= since_s]
        return any(computes(op.op, op.lane) for op in late)

    @cached_property
    def _ends(self) -> list[float]:
        return sorted([e.end_s for e in self.view.computing])

    @cached_property
    def _usual_s(self) -> float:
        """What usually passes from one issue to the next."""
        times = [e.issue_s for e in self.view.ops]
        pauses = [b - a for a, b in pairwise(times) if b > a]
        return median(pauses) if pauses else 0.0
