"""Why an operation began when it did, who waited for it, and the chain that a step's time consists of.

All of it is read off the events of a timeline, so it means the same for a predicted and a measured run. An operation
begins at the latest of a few moments: the end of what it waited for, the end of the operation before it on its lane,
the moment its CPU issued it. A collective is a rendezvous, so there the last rank of its group decides.
(`fsdp_sim.diagnose.critical_path` does the same from the program of a simulation, which knows more than its events.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import Literal, NamedTuple

from fsdp_sim.timeline import COLLECTIVES, Event, Lane, Timeline, computes, group_number

Key = tuple[int, int]
"""An operation of a timeline: its rank and its seq."""
Why = Literal["lane", "event", "CPU"]
CLOSE_S = 1e-9  # moments nearer than this are one: a clock's resolution


class Cause(NamedTuple):
    """Why an operation began when it did.

    Attributes:
        why: ``lane``, the operation before it on its lane ended; ``event``, what it waited for ended; ``CPU``, it was
            issued.
        key: the operation that ended; None for ``CPU``.
        rank: the rank where that was so: for a collective the one that came last.
        at_s: when.
    """

    why: Why
    key: Key | None
    rank: int
    at_s: float


class Piece(NamedTuple):
    """A piece of a critical path: an operation, or (``cpu``) a CPU that issues up to and including that operation."""

    key: Key
    cpu: bool
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


class Chain(NamedTuple):
    """What an operation depends on and what depends on it.

    Attributes:
        before: from the operation that made it begin when it did back to the first, each by its own cause.
        waited_for: all it had to wait for, beyond the operation before it on its lane.
        after: the operations that waited for it or began because it ended.
    """

    before: tuple[Key, ...]
    waited_for: tuple[Key, ...]
    after: tuple[Key, ...]


class Links:
    """The dependencies among the operations of one step of a timeline; found once, asked often."""

    def __init__(self, timeline: Timeline, step: int) -> None:
        self.world_size = timeline.header.world_size
        self.step = step
        self.events: dict[int, list[Event]] = defaultdict(list)
        for event in timeline.events:
            if event.step == step:
                self.events[event.rank].append(event)
        self._causes: dict[Key, Cause] = {}
        self.ops: dict[Key, Event] = {
            (rank, e.seq): e for rank, events in self.events.items() for e in events if not e.is_memory
        }

    @cached_property
    def begin_s(self) -> float:
        """When the first operation begins."""
        return min((e.start_s for e in self.ops.values()), default=0.0)

    @cached_property
    def lane_before(self) -> dict[Key, Key]:
        """Of each operation the one before it on its lane, where there is one."""
        last: dict[tuple[int, Lane], Key] = {}
        found = {}
        for key, e in sorted(self.ops.items(), key=lambda item: (item[1].start_s, item[1].seq)):
            if (lane := (e.rank, e.lane)) in last:
                found[key] = last[lane]
            last[lane] = key
        return found

    def waited_for(self, key: Key) -> list[Key]:
        """The operations of the step that one had to wait for, beyond the one before it on its lane."""
        return [(key[0], seq) for seq in self.ops[key].waits_on if (key[0], seq) in self.ops]

    @cached_property
    def awaited_by(self) -> dict[Key, list[Key]]:
        """Of each operation those that had to wait for it."""
        found: dict[Key, list[Key]] = defaultdict(list)
        for key in self.ops:
            for before in self.waited_for(key):
                found[before].append(key)
        return found

    @cached_property
    def _meetings(self) -> dict[tuple[object, ...], list[Key]]:
        """The same collective on each rank: same operation and unit, and as many of them before it."""
        met: dict[tuple[object, ...], list[Key]] = defaultdict(list)
        for key in self.ops:
            if name := self._meeting_of.get(key):
                met[name].append(key)
        return met

    @cached_property
    def _meeting_of(self) -> dict[Key, tuple[object, ...]]:
        seen: dict[tuple[object, ...], int] = defaultdict(int)
        names: dict[Key, tuple[object, ...]] = {}
        for key, e in self.ops.items():
            if e.op in COLLECTIVES and e.group_size > 1:
                what = (e.op, e.unit, e.phase, e.micro_batch, e.group_size)
                group = group_number(e.op, e.rank, e.group_size, self.world_size)
                names[key] = (*what, group, seen[e.rank, what])
                seen[e.rank, what] += 1
        return names

    def cause(self, key: Key) -> Cause:
        """Why an operation began when it did."""
        if key not in self._causes:
            self._causes[key] = self._cause(key)
        return self._causes[key]

    def _cause(self, key: Key) -> Cause:
        peers = self._meetings[self._meeting_of[key]] if key in self._meeting_of else [key]
        if len(peers) == 1:
            return self._own_cause(key)
        causes = {peer: self._own_cause(peer) for peer in peers}
        mine = causes[key]
        last = max(peers, key=lambda peer: (self.ops[peer].start_s, causes[peer].at_s))
        late = self.ops[last].start_s > self.ops[key].start_s + CLOSE_S or causes[last].at_s > mine.at_s + CLOSE_S
        return causes[last] if late else mine

    def _own_cause(self, key: Key) -> Cause:
        e, rank = self.ops[key], key[0]
        best = Cause("CPU", None, rank, min(e.issue_s, e.start_s))
        queued: list[tuple[Why, Key]] = [("lane", self.lane_before[key])] if key in self.lane_before else []
        waited: list[tuple[Why, Key]] = [("event", other) for other in self.waited_for(key)]
        for why, other in queued + waited:
            at_s = self.ops[other].end_s
            later = at_s > best.at_s or (best.why == "CPU" and at_s >= best.at_s - CLOSE_S)
            if later and at_s <= e.start_s + CLOSE_S:
                best = Cause(why, other, rank, at_s)
        return best

    @cached_property
    def _stops(self) -> dict[Key, Key]:
        """Of each event the operation that its CPU last stood still for before issuing it, where there is one."""
        found: dict[Key, Key] = {}
        for rank, events in self.events.items():
            issued = [e.issue_s for e in events]
            at: list[Key | None] = [None] * len(events)
            computes_itself = self._cpu_computes(rank)
            for place, e in enumerate(events):
                if e.is_memory:
                    continue
                waits = [(key, place) for key in self.waited_for((rank, e.seq))]
                if computes_itself and computes(e.op, e.lane):
                    waits.append(((rank, e.seq), len(events) - 1))
                for key, latest in waits:
                    end_s = self.ops[key].end_s
                    first = bisect_left(issued, end_s - CLOSE_S)  # the first event issued when it had ended
                    if first <= latest:
                        best = at[first]
                        if best is None or self.ops[best].end_s < end_s:
                            at[first] = key
            last: Key | None = None
            for e, stop in zip(events, at, strict=True):
                last = stop or last
                if last is not None:
                    found[rank, e.seq] = last
        return found

    def _cpu_computes(self, rank: int) -> bool:
        """Whether the CPU runs the computation itself: nothing it issues to compute ever queues."""
        computing = [e for e in self.events[rank] if not e.is_memory and computes(e.op, e.lane)]
        return all(e.start_s <= e.issue_s + CLOSE_S for e in computing)

    def stood_still_for(self, key: Key) -> Key | None:
        """The operation whose end the CPU last waited for before it issued one; None if it never did."""
        return self._stops.get(key)

    def back(self, key: Key) -> Iterator[tuple[Key, Cause]]:
        """An operation and, again and again, the one that made it begin when it did; with the cause of each.

        Of a collective it is the one of the rank that came last.
        """
        seen: set[Key] = set()  # operations that take no time may wait for each other
        at: Key | None = key
        while at is not None and at not in seen:
            seen.add(at)
            cause = self.cause(at)
            at = self._on(at, cause.rank)
            yield at, cause
            at = self.made_by(at)

    def made_by(self, key: Key) -> Key | None:
        """The operation whose end made one begin, or for which its CPU stood still before it issued it late."""
        cause = self.cause(key)
        return self.stood_still_for(self._on(key, cause.rank)) if cause.why == "CPU" else cause.key

    @cached_property
    def _made(self) -> dict[Key, list[Key]]:
        """Of each operation those that began when it ended, because it ended."""
        found: dict[Key, list[Key]] = defaultdict(list)
        for key in self.ops:
            if (before := self.made_by(key)) is not None:
                found[before].append(key)
        return found

    def _on(self, key: Key, rank: int) -> Key:
        """The same collective on another rank of its group."""
        if key[0] == rank:
            return key
        return next(peer for peer in self._meetings[self._meeting_of[key]] if peer[0] == rank)

    def chain(self, key: Key) -> Chain:
        """See `chain`."""
        before = [k for k, _ in self.back(key)][1:]
        after = [*self.awaited_by.get(key, []), *self._made.get(key, [])]
        return Chain(tuple(before), tuple(self.waited_for(key)), tuple(dict.fromkeys(after)))

    def critical_path(self) -> list[Piece]:
        """See `critical_path`."""
        if not self.ops:
            return []
        begin = self.begin_s
        last = max(self.ops, key=lambda key: (self.ops[key].end_s, self.ops[key].seq))
        pieces: list[Piece] = []
        now = self.ops[last].end_s
        for key, cause in self.back(last):
            start = self.ops[key].start_s
            now = min(now, self.ops[key].end_s)
            if now > start:
                pieces.append(Piece(key, False, start, now))
            now = start
            if cause.why == "CPU":
                before = self.stood_still_for(key)
                went_on = max(begin, self.ops[before].end_s) if before else begin
                if now > went_on:
                    pieces.append(Piece(key, True, went_on, now))
                    now = went_on
        return pieces[::-1]


def chain(timeline: Timeline, rank: int, seq: int) -> Chain:
    """What made an operation begin when it did, back to the start of its step; what it waited for; who waited for it.

    Raises:
        ValueError: the rank has no operation of that number.
    """
    event = next((e for e in timeline.events if (e.rank, e.seq) == (rank, seq)), None)
    if event is None or event.is_memory:
        what = "which takes no time" if event else f"of which it has none; its ranks are {list(timeline.ranks)}"
        raise ValueError(f"rank {rank}, seq {seq} is {event.label if event else 'an event'} of the timeline, {what}")
    return Links(timeline, event.step).chain((rank, seq))


def critical_path(timeline: Timeline, step: int) -> list[Piece]:
    """The operations that a step's time consists of, in order of time.

    Where the clock was simulated each piece begins where the one before ends. In a measured run what lies between two
    pieces is time that no event accounts for: Python, a thread that wakes up.

    Raises:
        ValueError: the timeline has no operation in that step.
    """
    if not any(e.step == step for e in timeline.ops):
        raise ValueError(f"step {step} has no operations; the steps that have some are {list(timeline.steps)}")
    return Links(timeline, step).critical_path()
