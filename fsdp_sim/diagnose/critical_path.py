"""`RunCauses`: why the operations of a simulation began when they did, which its run says exactly.

A run knows what a timeline has to leave out: at which instructions the CPU stood still, and which operations ended late
because it was still issuing them. Of a thousand ranks it looks at those on the path, and makes events of none.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import reduce

from fsdp_sim.diagnose.causes import Cause, Causes, Key, PathPiece
from fsdp_sim.engine import Run, Seconds, at_rank, dependencies, group_of, later


class RunCauses(Causes):
    """Why the operations of a run began when they did; the number of an operation is its place in ``run.ops``."""

    def __init__(self, run: Run) -> None:
        self.run = run
        order = dependencies(run.program, run.on_cpu)
        self.before = order.before
        self.blocks = {stop.number: stop.on for stop in order.stops}
        self._stops: dict[int, tuple[list[int], list[Key]]] = {}
        self._times, self._alone = run.columns, run.ranks == 1

    def start_s(self, key: Key) -> float:
        return at_rank(self._times.start_s[key[1]], key[0])

    def end_s(self, key: Key) -> float:
        return at_rank(self._times.end_s[key[1]], key[0])

    def issued_s(self, key: Key) -> float | None:
        """When the CPU was done issuing an operation that had to go on until then; None where it had not."""
        late = self._times.late
        if key[1] not in late:
            return None
        issued_s = at_rank(late[key[1]], key[0])
        return issued_s if issued_s < self.end_s(key) else None

    def own_cause(self, key: Key) -> Cause:
        """Why an operation began when it did, by what its own rank says."""
        rank, k = key
        start_s, end_s = at_rank(self._times.start_s[k], rank), self._times.end_s
        issue_s = at_rank(self._times.issue_s[k], rank)
        if issue_s <= start_s:  # what `cause_of` says where a clock is exact, found with fewer looks
            stream, communicator, events, _ = self.before[k]
            if stream >= 0 and at_rank(end_s[stream], rank) == start_s:
                return Cause("lane", (rank, stream), rank)
            for op in events:
                if at_rank(end_s[op], rank) == start_s:
                    return Cause("event", (rank, op), rank)
            if communicator >= 0 and at_rank(end_s[communicator], rank) == start_s:
                return Cause("communicator", (rank, communicator), rank)
        return Cause("CPU" if issue_s >= start_s else "unknown", None, rank)

    def last_to_come(self, key: Key) -> Key:
        """Of a collective the one of the rank that came last, if others came earlier; else the operation itself."""
        if self._alone:
            return key
        (rank, k), columns = key, self.run.columns
        if not self.run.ops[k].communicator:
            return key
        i, (stream, communicator, events, _) = self.run.ops[k], self.before[k]
        ends = [columns.end_s[op] for op in (stream, communicator, *events) if op >= 0]
        ready: Seconds = reduce(later, ends, columns.issue_s[k])
        if at_rank(ready, rank) == self.start_s(key):
            return key
        group = group_of(i, rank, self.run.program.world_size, self.run.ranks)
        return max(group, key=lambda peer: at_rank(ready, peer)), k

    def stood_still_for(self, key: Key) -> Key | None:
        """The operation whose end the CPU last waited for before it issued one; None if it never did."""
        numbers, ops = self._stops_of(key[0])
        place = bisect_left(numbers, self._numbers[key[1]]) - 1
        return ops[place] if place >= 0 else None

    @property
    def _numbers(self) -> list[int]:
        """The number of each operation among the instructions."""
        return self.run.program.numbers

    def _stops_of(self, rank: int) -> tuple[list[int], list[Key]]:
        """The instructions at which a rank's CPU really waited, and the operation it waited for at each."""
        if rank not in self._stops:
            run, stops = self.run, {}
            for number, (since, until) in run.columns.blocks.items():
                until_s = at_rank(until, rank)
                if until_s > at_rank(since, rank):
                    stops[number] = next((rank, k) for k in self.blocks[number] if self.end_s((rank, k)) == until_s)
            if run.on_cpu:  # there every computation occupies the CPU
                stops |= {self._numbers[k]: (rank, k) for k, i in enumerate(run.ops) if not i.communicator}
            numbers = sorted(stops)
            self._stops[rank] = numbers, [stops[number] for number in numbers]
        return self._stops[rank]

    def last(self, step: int) -> Key:
        """The operation that ends a step, on a rank on which it does; the last issued of several."""
        end_s = self.run.step_ends_s[step]
        for k in range(len(self.run.ops) - 1, -1, -1):
            found = self.run.columns.end_s[k]
            if isinstance(found, float):
                if found == end_s:
                    return 0, k
            elif found.max() == end_s:
                return int(found.argmax()), k
        raise AssertionError(f"no operation ends at {end_s}")


def critical_path_of_run(run: Run, step: int = -1, causes: RunCauses | None = None) -> list[PathPiece]:
    """The operations that a step's time consists of, in order of time; their numbers are places in ``run.ops``.

    Each piece begins where the one before ends. The first begins where the step before ended and the last ends with the
    step, so that they add up to `Run.step_time_s`. Operations that take no time are left out.

    Raises:
        ValueError: the program has no such step.
    """
    run.step_time_s(step)  # or an error
    step %= len(run.step_ends_s)
    begin_s = run.step_ends_s[step - 1] if step else 0.0
    if run.step_ends_s[step] <= begin_s:
        return []
    causes = causes or RunCauses(run)
    return causes.path_to(causes.last(step), begin_s)
