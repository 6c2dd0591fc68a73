"""`critical_path_of_run`: the chain of operations that a step's time consists of, each started by the one before.

An operation starts at the latest of a few moments: the end of what it has to come after, or the moment the CPU has
issued it. Following that latest moment back from the last operation of a step gives a path that has no gaps, so its
pieces add up to the step: what is not on it could have been slower at no cost. A collective starts when the last rank
of its group is ready; there the path goes over to that rank.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from fsdp_sim.engine import Before, Run, Seconds, at_rank, dependencies, group_of
from fsdp_sim.schedule import Instruction, Kind

Why = Literal["stream", "communicator", "event", "CPU issue", "start"]


class Cause(NamedTuple):
    """Why an operation starts when it does.

    Attributes:
        why: ``stream``, it follows the operation before it on its stream; ``communicator``, the collective before it on
            its communicator; ``event``, it waits for another stream; ``CPU issue``, the CPU has not issued it earlier;
            ``start``, it starts with the run.
        op: the operation it waits for, by its number; -1 for none.
        rank: the rank on which that is so.
    """

    why: Why
    op: int
    rank: int


class Piece(NamedTuple):
    """A piece of a critical path.

    Attributes:
        k: number of the operation.
        op: the operation.
        cpu: whether the operation does not run here: the CPU issues, up to and including this operation.
        rank: the rank it runs on.
        start_s, end_s: the part of it that is on the path.
        cause: why it starts when it does.
    """

    k: int
    op: Instruction
    cpu: bool
    rank: int
    start_s: float
    end_s: float
    cause: Cause

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        return f"the CPU issues up to {self.op.what}" if self.cpu else self.op.what


class Causes:
    """Says of the operations of a run why they start when they do."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.before, self.blocks = dependencies(run.program, run.on_cpu)
        self._stops: dict[int, tuple[list[int], list[float]]] = {}

    @cached_property
    def numbers(self) -> list[int]:
        """The number of each operation among the instructions."""
        return [number for number, i in enumerate(self.run.program.instructions) if i.kind is Kind.OP]

    def start_s(self, k: int, rank: int) -> float:
        return at_rank(self.run.columns.start_s[k], rank)

    def end_s(self, k: int, rank: int) -> float:
        return at_rank(self.run.columns.end_s[k], rank)

    def of(self, k: int, rank: int) -> Cause:
        """Why an operation starts when it does."""
        run, start = self.run, self.start_s(k, rank)
        before = _candidates(self.before[k])
        for why, op in before:
            if self.end_s(op, rank) == start:
                return Cause(why, op, rank)
        if at_rank(run.columns.issue_s[k], rank) == start and start > 0:
            return Cause("CPU issue", -1, rank)
        for why, op in before:  # a rendezvous: another rank of the group came last
            if (late := self._late(run.columns.end_s[op], k, rank, start)) >= 0:
                return Cause(why, op, late)
        if start > 0 and (late := self._late(run.columns.issue_s[k], k, rank, start)) >= 0:
            return Cause("CPU issue", -1, late)
        return Cause("start", -1, rank)

    def _late(self, times: Seconds, k: int, rank: int, start: float) -> int:
        """The first rank of an operation's group on which something happens at its very start; -1 for none."""
        run, i = self.run, self.run.ops[k]
        if isinstance(times, float) or not np.ndim(times) or not i.communicator:
            return -1
        group = group_of(i, rank, run.program.world_size, run.ranks)
        found = np.flatnonzero(times[group.start : group.stop : group.step] == start)
        return group[int(found[0])] if len(found) else -1

    def stop(self, number: int, rank: int) -> tuple[float, int, int]:
        """The last time before an instruction that the CPU really waited.

        Returns:
            when it went on, the number of the instruction at which it waited, and the operation it waited for; 0.0, -1
            and -1 if it never did.
        """
        numbers, times = self._stops_of(rank)
        place = bisect_left(numbers, number) - 1
        if place < 0:
            return 0.0, -1, -1
        at, time = numbers[place], times[place]
        if at in self.blocks:
            return time, at, next((op for op in self.blocks[at] if self.end_s(op, rank) == time), -1)
        return time, at, bisect_left(self.numbers, at)

    def _stops_of(self, rank: int) -> tuple[list[int], list[float]]:
        if rank not in self._stops:
            columns = self.run.columns
            stops = {
                n: at_rank(after, rank)
                for n, (b, after) in columns.blocks.items()
                if at_rank(after, rank) > at_rank(b, rank)
            }
            if self.run.on_cpu:  # there every computation occupies the CPU
                for k, i in enumerate(self.run.ops):
                    if not i.communicator:
                        stops[self.numbers[k]] = self.end_s(k, rank)
            self._stops[rank] = (sorted(stops), [stops[n] for n in sorted(stops)])
        return self._stops[rank]


def critical_path_of_run(run: Run, step: int = -1, causes: Causes | None = None) -> list[Piece]:
    """The operations that a step's time consists of, in order of time.

    Each piece begins where the one before ends. The first begins where the step before ended and the last ends with the
    step, so that they add up to `Run.step_time_s`. Operations that take no time are left out.

    Raises:
        ValueError: the program has no such step.
    """
    run.step_time_s(step)  # or an error
    step %= len(run.step_ends_s)
    end, begin = run.step_ends_s[step], run.step_ends_s[step - 1] if step else 0.0
    if end <= begin:
        return []
    causes = causes or Causes(run)
    k, rank = _last(run, end)
    pieces: list[Piece] = []
    now = end
    while now > begin:
        late = run.columns.late.get(k)
        if late is not None and at_rank(late, rank) < now:  # the CPU was still issuing it
            start, cause = at_rank(late, rank), Cause("CPU issue", -1, rank)
        else:
            start, cause = causes.start_s(k, rank), causes.of(k, rank)
        if now > start:
            pieces.append(Piece(k, run.ops[k], False, rank, max(start, begin), now, cause))
        now = start
        if cause.why == "start" or now <= begin:
            break
        if cause.why == "CPU issue":
            issued, rank = k, cause.rank
            went_on, at, op = causes.stop(causes.numbers[issued], rank)
            if now > went_on:
                why = Cause("event" if op >= 0 else "start", op, rank)
                pieces.append(Piece(issued, run.ops[issued], True, rank, max(went_on, begin), now, why))
            now = went_on
            if at < 0:
                break
            k = op
        else:
            k, rank = cause.op, cause.rank
    return pieces[::-1]


def _last(run: Run, end: float) -> tuple[int, int]:
    """The operation, and a rank on which it ends, that ends at that moment; the last issued of several."""
    for k in range(len(run.ops) - 1, -1, -1):
        found = np.atleast_1d(np.asarray(run.columns.end_s[k]))
        if found.max() == end:
            return k, int(found.argmax())
    raise AssertionError(f"no operation ends at {end}")


def _candidates(before: Before) -> list[tuple[Why, int]]:
    found: list[tuple[Why, int]] = [("stream", before.stream)]
    found += [("event", op) for op in before.events]
    found.append(("communicator", before.communicator))
    return [(why, op) for why, op in found if op >= 0]
