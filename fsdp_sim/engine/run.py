"""`Run`: a program that has been played, as columns. Events are made of it only when a timeline is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, cast

from msgspec import structs

from fsdp_sim.engine.dependencies import dependencies
from fsdp_sim.engine.record import EventRows, RankTimes, once, own_changes
from fsdp_sim.engine.seconds import OpCosts, Seconds, Times
from fsdp_sim.schedule import Instruction, Program
from fsdp_sim.timeline import Columns, Header, Timeline


@dataclass(frozen=True)
class OpTimes:
    """What a pass finds out, one entry per operation in issue order: a number, or one per rank.

    Attributes:
        issue_s: when (the first kernel of) an operation is issued.
        clock_s: the CPU's clock when it goes on to the next.
        start_s, end_s: when the operation runs.
        blocks: where the CPU really waited: instruction number -> (when it began to, when it went on).
        late: the operations that ended late because the CPU was still issuing them: operation -> when it was done
            issuing; of several ranks, not a number on those where it was not so.
    """

    issue_s: Sequence[Seconds]
    clock_s: Sequence[Seconds]
    start_s: Sequence[Seconds]
    end_s: Sequence[Seconds]
    blocks: Mapping[int, tuple[Seconds, Seconds]]
    late: Mapping[int, Seconds]


@dataclass(frozen=True)
class Run:
    """When each operation of a program runs, on each rank.

    Attributes:
        program: what was played.
        costs: what each operation cost, before contention.
        columns: the times.
        device: ``gpu`` or ``cpu``.
        replayed: plays the same program with other costs.
        known: what others have worked out of it, which it keeps for them.
    """

    program: Program
    costs: OpCosts = field(repr=False)
    columns: OpTimes = field(repr=False)
    device: str
    replayed: Callable[[OpCosts], Run] = field(repr=False, compare=False)
    known: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def ops(self) -> tuple[Instruction, ...]:
        """The operations, in issue order: entry k of a column is of ``ops[k]``."""
        return self.costs.ops

    @property
    def ranks(self) -> int:
        return self.costs.ranks

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @cached_property
    def step_ends_s(self) -> list[float]:
        """When the last rank ends the last operation of each step."""
        if self.costs.per_rank:
            ends = [end if isinstance(end, float) else float(end.max()) for end in self.columns.end_s]
        else:
            ends = self.of_rank(self.columns.end_s, 0)
        steps = self.program.ops_of_steps
        latest = (
            [max([ends[k] for k in ops], default=0.0) for ops in steps] if len(steps) > 1 else [max(ends, default=0.0)]
        )
        return list(accumulate(latest, max))

    def step_time_s(self, step: int = -1) -> float:
        """From the end of the step before (or the start of the run) to the end of this one; the last by default.

        Raises:
            ValueError: the program has no such step.
        """
        ends = self.step_ends_s
        if not -len(ends) <= step < len(ends):
            raise ValueError(f"step {step} is not in the program, which has steps 0 to {len(ends) - 1}")
        step %= len(ends)
        return ends[step] - (ends[step - 1] if step else 0.0)

    @property
    def span_s(self) -> float:
        """When the last operation ends."""
        return self.step_ends_s[-1] if self.columns.end_s else 0.0

    def of_rank(self, column: Sequence[Seconds], rank: int) -> list[float]:
        """One rank's entries of a column, as numbers."""
        self.check_rank(rank)
        if self.costs.per_rank:
            return [at_rank(time, rank) for time in column]
        return list(cast(Sequence[float], column))

    def check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} was not played; the run has ranks 0 to {self.ranks - 1}")

    def array(self, column: Sequence[Seconds]) -> Times:
        """A column as an array of shape (operations, ranks)."""
        import numpy as np

        return np.array([np.broadcast_to(np.asarray(c, dtype=float), (self.ranks,)) for c in column])

    def scaled(self, compute: float = 1.0, network: float = 1.0, cpu: float = 1.0) -> Run:
        """The same program played again, with compute, collectives or the CPU taking that many times as long.

        See `OpCosts.scaled`.
        """
        return self.replayed(self.costs.scaled(compute, network, cpu))

    def unlaunched_s(self, rank: int = 0) -> list[float]:
        """How long the device had nothing to do inside of each operation, as the CPU was still launching its kernels.

        What slows an operation down while it runs counts too.
        """
        found = [0.0] * len(self.ops)
        columns, seconds = self.columns, self.costs.seconds
        for k, issued in columns.late.items():
            if not math.isnan(at_rank(issued, rank)):
                lasted = at_rank(columns.end_s[k], rank) - at_rank(columns.start_s[k], rank)
                found[k] = max(0.0, lasted - at_rank(seconds[k], rank))
        return found

    def memory_times(self, rank: int = 0) -> tuple[list[int], list[float], list[float]]:
        """Of the allocs, frees and record_streams: their numbers, the CPU's clock, and when their streams get there.

        Both follow from the times of the operations, so a pass does not keep them.
        """
        clocks, ends = self.of_rank(self.columns.clock_s, rank), self.of_rank(self.columns.end_s, rank)
        blocks = {n: at_rank(after, rank) for n, (_, after) in self.columns.blocks.items()}
        about_memory = dependencies(self.program, self.on_cpu).about_memory
        cpus: list[float] = []
        streams: list[float] = []
        clocks.append(0.0)  # of the operation before the first, number -1
        for _, issued, stops, after in about_memory:
            cpu = clocks[issued - 1]
            for stop in stops:
                cpu = max(cpu, blocks.get(stop, 0.0))
            cpus.append(cpu)
            for op in after:
                if ends[op] > cpu:
                    cpu = ends[op]
            streams.append(cpu)
        return [one.number for one in about_memory], cpus, streams

    def timeline(self, ranks: Iterable[int] | None = None) -> Timeline:
        """The run as events: operations, allocations and frees of the given ranks, of all by default.

        An allocation has the CPU's time as ``issue_s`` and, as ``start_s`` and ``end_s``, the time its stream gets
        there. An asynchronous collective is on the lane of its kind, since its process group's stream has no name.
        """
        rows = self.program.once(("rows", self.on_cpu), lambda: EventRows(self.program, self.on_cpu))
        return self.recorded(rows, lambda: [i.bytes for i in own_changes(self.program)], lambda: self._header, ranks)

    @property
    def _header(self) -> Header:
        return structs.replace(self.program.header, clock="simulated", device=self.device)

    def recorded(
        self,
        rows: EventRows,
        sizes: Callable[[], Sequence[int]],
        header: Header | Callable[[], Header],
        ranks: Iterable[int] | None = None,
    ) -> Timeline:
        """The events of these rows, at the times of this run, on the given ranks, on all by default.

        Args:
            sizes: see `Rows.columns`.
        """
        parts = []
        for rank in range(self.ranks) if ranks is None else sorted(ranks):
            self.check_rank(rank)
            parts.append(rows.columns(rank, partial(self._times, rank), sizes))
        return Timeline(header, Columns.joined(parts))

    def _times(self, rank: int) -> RankTimes:
        return self._times_of_all if self.ranks == 1 else self._times_of(rank)

    @cached_property
    def _times_of_all(self) -> RankTimes:
        """Those of the one rank that stands for all, which the timelines of a run share."""
        return self._times_of(0)

    def _times_of(self, rank: int) -> RankTimes:
        columns = self.columns
        issued, starts, ends = (self.of_rank(c, rank) for c in (columns.issue_s, columns.start_s, columns.end_s))
        unlaunched = once(lambda: self.unlaunched_s(rank))
        return RankTimes(issued, starts, ends, unlaunched, once(lambda: self.memory_times(rank)[1:]))


def at_rank(time: Seconds, rank: int) -> float:
    """One rank's entry of a time that may be the same on all."""
    if type(time) is float or isinstance(time, float):
        return time
    return float(time[rank]) if time.ndim else float(time)
