"""`Links`: the dependencies among the operations of one step of a timeline, predicted or measured."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import cached_property
from typing import NamedTuple

from fsdp_sim.diagnose.causes import Cause, Causes, Key, PathPiece
from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.timeline import COLLECTIVES, Event, Timeline, computes, spans_of_steps

CLOSE_S = 1e-9  # moments nearer than this are one: a clock's resolution


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


class Links(Causes):
    """The dependencies among the operations of one step of a timeline; found once, asked often.

    Attributes:
        ops: the operations of the step by their rank and seq.
        begin_s: when the step begins.
    """

    def __init__(self, timeline: Timeline, step: int, peers: Peers | None = None) -> None:
        self.peers = peers or Peers(timeline)
        self.step = step
        self.ops: dict[Key, Event] = {(e.rank, e.seq): e for e in timeline.ops if e.step == step}
        self.begin_s = spans_of_steps(timeline)[step][0] if self.ops else 0.0
        self._own_causes: dict[Key, Cause] = {}
        self._last: dict[Key, Key] = {}

    def start_s(self, key: Key) -> float:
        return self.ops[key].start_s

    def end_s(self, key: Key) -> float:
        return self.ops[key].end_s

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

    def own_cause(self, key: Key) -> Cause:
        """Why an operation began when it did, by what its own rank says; if it does not, the last thing it came after.

        What ended before the step is no cause: it began because it was issued.
        """
        if key not in self._own_causes:
            e, view = self.ops[key], self.peers.view(key[0])
            cause = view.cause(e)
            if cause.why == "unknown" and view.after_s(e) > e.issue_s:
                why, op = max(view.before(e), key=lambda one: one[1].end_s)
                cause = Cause(why, (op.rank, op.seq), key[0])
            if cause.key not in self.ops:
                cause = Cause("CPU", None, key[0])
            self._own_causes[key] = cause
        return self._own_causes[key]

    def last_to_come(self, key: Key) -> Key:
        """Of a collective the one of the rank that came last, if others came earlier; else the operation itself."""
        e = self.ops[key]
        if e.op not in COLLECTIVES or e.group_size == 1 or not self.peers.several:
            return key
        if key not in self._last:
            came: dict[Key, tuple[float, float]] = {}
            for peer in self.peers.group(e):
                ready_s = max(self.peers.view(peer.rank).after_s(peer), peer.issue_s)
                came[peer.rank, peer.seq] = peer.start_s, ready_s
            last = max(came, key=lambda other: came[other])
            for other, times in came.items():
                late = any(its > own + CLOSE_S for its, own in zip(came[last], times, strict=True))
                self._last[other] = last if late else other
        return self._last[key]

    @cached_property
    def _stops(self) -> dict[Key, Key]:
        """Of each event the operation that its CPU last stood still for before issuing it, where there is one."""
        found: dict[Key, Key] = {}
        for rank in {rank for rank, _ in self.ops}:
            view = self.peers.view(rank)
            events = [e for e in view.events if e.step == self.step]
            issued = [e.issue_s for e in events]
            at: list[Key | None] = [None] * len(events)
            for place, e in enumerate(events):
                if e.is_memory:
                    continue
                waits = [(key, place) for key in self.waited_for((rank, e.seq))]
                if view.on_cpu and computes(e.op, e.lane):
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

    def stood_still_for(self, key: Key) -> Key | None:
        """The operation whose end the CPU last waited for before it issued one; None if it never did."""
        return self._stops.get(key)

    @cached_property
    def _made(self) -> dict[Key, list[Key]]:
        """Of each operation those that began when it ended, because it ended."""
        found: dict[Key, list[Key]] = defaultdict(list)
        for key in self.ops:
            if (before := self.made_by(key)) is not None:
                found[before].append(key)
        return found

    def chain(self, key: Key) -> Chain:
        """See `chain`."""
        before = [k for k, _ in self.back(key)][1:]
        after = [*self.awaited_by.get(key, []), *self._made.get(key, [])]
        return Chain(tuple(before), tuple(self.waited_for(key)), tuple(dict.fromkeys(after)))

    def critical_path(self) -> list[PathPiece]:
        """See `critical_path`."""
        if not self.ops:
            return []
        last = max(self.ops, key=lambda key: (self.ops[key].end_s, self.ops[key].seq))
        return self.path_to(last, self.begin_s)


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


def critical_path(timeline: Timeline, step: int) -> list[PathPiece]:
    """The operations that a step's time consists of, in order of time.

    Where the clock was simulated each piece begins where the one before ends. In a measured run what lies between two
    pieces is time that no event accounts for: Python, a thread that wakes up.

    Raises:
        ValueError: the timeline has no operation in that step.
    """
    if not any(e.step == step for e in timeline.ops):
        raise ValueError(f"step {step} has no operations; the steps that have some are {list(timeline.steps)}")
    return Links(timeline, step).critical_path()
