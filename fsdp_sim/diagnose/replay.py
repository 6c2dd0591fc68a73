"""`Replay`: a recorded step of several ranks played again with other durations, which says what a change would win.

An operation begins when what it came after has ended and its CPU has issued it, and as much later as it did in the
record. A thread that computes, too, issues as much earlier as what it did before is over. A collective begins on each
rank in turn, and moves bytes from when the last has come. Played with the durations of the record it gives the record
back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

from fsdp_sim.diagnose.causes import Key
from fsdp_sim.diagnose.peers import Peers
from fsdp_sim.timeline import COLLECTIVES, Event


class Replay:
    """One step of a timeline.

    Attributes:
        ops: the operations of the step on every rank.
    """

    def __init__(self, peers: Peers, step: int) -> None:
        self.peers = peers
        self.ops: dict[Key, Event] = {(e.rank, e.seq): e for e in peers.timeline.ops if e.step == step}

    @cached_property
    def _before(self) -> dict[Key, list[Key]]:
        """What each operation came after, within the step: what had ended when it began."""
        found: dict[Key, list[Key]] = {}
        for key, e in self.ops.items():
            view = self.peers.view(key[0])
            came = [op for _, op in view.before(e) if op.end_s <= e.start_s + view.touch_s]
            found[key] = [before for op in came if (before := (op.rank, op.seq)) in self.ops]
        return found

    @cached_property
    def _meeting(self) -> dict[Key, list[Key]]:
        """Of each collective its ranks' operations."""
        return {
            (e.rank, e.seq): keys
            for events in self.peers.meetings
            if len(keys := [key for e in events if (key := (e.rank, e.seq)) in self.ops]) > 1
            for e in events
            if (e.rank, e.seq) in self.ops
        }

    @cached_property
    def _came_s(self) -> dict[Key, float]:
        """When each rank came to its collectives, which may begin only when the last has come."""
        return {
            key: self.peers.came_s([self.ops[k] for k in keys], self.ops[key]) for key, keys in self._meeting.items()
        }

    @cached_property
    def _over(self) -> dict[Key, Key]:
        """Where the thread that computes also issues: what was over last when it issued an operation."""
        ended: dict[int, list[tuple[float, Key]]] = defaultdict(list)
        for key, e in self.ops.items():
            if self.peers.view(key[0]).on_cpu:
                ended[key[0]].append((e.end_s, key))
        for some in ended.values():
            some.sort()
        found: dict[Key, Key] = {}
        for key, e in self.ops.items():
            some = ended[key[0]]
            if place := bisect_right(some, e.issue_s + self.peers.view(key[0]).touch_s, key=lambda one: one[0]):
                found[key] = some[place - 1][1]
        return found

    @cached_property
    def _order(self) -> list[Key]:
        return sorted(self.ops, key=lambda key: (self.ops[key].start_s, self.ops[key].end_s, key[1]))

    def step_s(self, shorter_s: Mapping[Key, float], earlier_s: Mapping[Key, float]) -> float:
        """How long the step would take.

        Args:
            shorter_s: by how much operations are shorter than in the record; of collectives nothing counts.
            earlier_s: by how much earlier the CPU issues operations; where it computes too, by how much a pause before
                them is shorter.
        """
        ends: dict[Key, float] = {}
        starts: dict[Key, float] = {}
        last_came_s = {key: max(self._came_s[k] for k in keys) for key, keys in self._meeting.items()}
        for key in self._order:
            e = self.ops[key]
            over = self._over.get(key)
            issue_s = e.issue_s - earlier_s.get(key, 0.0)
            if over in ends:
                issue_s -= self.ops[over].end_s - ends[over]
            before = self._before[key]
            bound_s = max([e.issue_s, *(self.ops[k].end_s for k in before)])
            moved_s = max([issue_s, *(ends[k] for k in before if k in ends)])
            starts[key] = moved_s + max(0.0, self._came_s.get(key, e.start_s) - bound_s)
            met = self._meeting.get(key)
            if met is None or e.op not in COLLECTIVES:
                ends[key] = starts[key] + max(0.0, e.duration_s - shorter_s.get(key, 0.0))
                continue
            last_s = last_came_s[key]
            if all(k in starts for k in met):
                go_s = max(starts[k] for k in met)
                for k in met:
                    ends[k] = go_s + max(0.0, self.ops[k].end_s - last_s)
        begin_s = min(starts.values())
        return max(ends.values(), default=begin_s) - begin_s
