"""`memory`: the bytes alive at every moment of a program, by what they are for.

Memory is allocated and freed at the CPU's time, in issue order, whatever the streams do (torch's caching allocator). So
the peak is a matter of order alone; when it comes takes a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fsdp_sim.cost import Work, Workload
from fsdp_sim.engine.allocator import UNLIMITED, Allocator, Pools, pools
from fsdp_sim.engine.changes import Changes, SizedChanges, changes_of
from fsdp_sim.engine.run import Run
from fsdp_sim.engine.tensors import needs_times
from fsdp_sim.schedule import Instruction, Program
from fsdp_sim.spec import OPTIMIZERS
from fsdp_sim.timeline import Header, Memory, Phase, Timeline


class Part(NamedTuple):
    """Part of what is alive at one moment."""

    category: Memory
    unit: str
    bytes: int


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """The bytes alive on a rank after each change, in the order of the changes.

    Attributes:
        program: what was issued.
        states: bytes that live through all steps, by (category, unit).
        sized: the changes with their sizes.
        run: when the instructions ran; None if the profile was made of a program alone.
        work: of its segments; None where it is of FSDP's buffers alone.
        allocator: how torch's caching allocator is set; None where there is none, as on CPU cores.
    """

    program: Program = field(repr=False)
    states: dict[tuple[Memory, str], int]
    sized: SizedChanges = field(repr=False)
    run: Run | None = field(default=None, repr=False)
    work: Mapping[str, Work] | None = field(default=None, repr=False)
    allocator: Allocator | None = UNLIMITED

    @property
    def which(self) -> Changes:
        """The changes, a column for each thing there is to say of them."""
        return self.sized.which

    @property
    def changes(self) -> list[int]:
        """(n,), the bytes of each."""
        return self.sized.bytes

    @property
    def at(self) -> list[int]:
        """(n,), the number of the instruction that makes each change."""
        return self.which.number

    @cached_property
    def bytes(self) -> list[int]:
        """(n,), all bytes alive after each change."""
        return list(accumulate(self.changes, initial=self.state_bytes))[1:]

    @cached_property
    def by_category(self) -> dict[Memory, list[int]]:
        """For each category that occurs, (n,): its bytes alive after each change."""
        before = dict.fromkeys(Memory, 0)
        for (category, _), n_bytes in self.states.items():
            before[category] += n_bytes
        found = set(self.which.category)
        return {
            category: list(accumulate(self._of(category), initial=before[category]))[1:]
            for category in Memory
            if category in found or before[category]
        }

    def _of(self, category: Memory) -> list[int]:
        """The changes of one category, 0 for the others."""
        return [n if of is category else 0 for of, n in zip(self.which.category, self.changes, strict=True)]

    @cached_property
    def peak_index(self) -> int:
        """The first change after which most is alive; -1 where nothing ever changes."""
        return self.bytes.index(max(self.bytes)) if self.changes else -1

    @property
    def state_bytes(self) -> int:
        """Bytes that live through all steps."""
        return sum(self.states.values())

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes alive at one moment: what ``torch.cuda.max_memory_allocated`` reports."""
        return self.sized.most(self.state_bytes)

    @property
    def peak_instruction(self) -> Instruction | None:
        """What was issued when the peak was reached."""
        return self.program.instructions[self.at[self.peak_index]] if self.changes else None

    @property
    def peak_s(self) -> float | None:
        """When the peak is reached on the device (see `times_s`); None without a run."""
        return self.times_s[self.peak_index] if self.run is not None and self.changes else None

    @cached_property
    def peak(self) -> list[Part]:
        """What makes up the peak, by category and unit, largest first."""
        return self.alive(self.peak_index)

    @cached_property
    def peak_by_category(self) -> dict[Memory, int]:
        """What makes up the peak, by category, largest first."""
        found: dict[Memory, int] = {}
        for category, _, n_bytes in self.peak:
            found[category] = found.get(category, 0) + n_bytes
        return dict(sorted(found.items(), key=lambda one: -one[1]))

    def alive(self, index: int) -> list[Part]:
        """What is alive after a change, by category and unit, largest first."""
        live = dict(self.states)
        upto = slice(0, index + 1)
        for key, n_bytes in zip(self.which.what[upto], self.changes[upto], strict=True):
            live[key] = live.get(key, 0) + n_bytes
        parts = [Part(category, unit, n_bytes) for (category, unit), n_bytes in live.items() if n_bytes]
        return sorted(parts, key=lambda part: -part.bytes)

    def peak_of(self, categories: Iterable[Memory] | None = None, phase: Phase | None = None) -> int:
        """The most bytes of some categories (all by default) alive at one moment of a phase (of all by default)."""
        wanted = set(Memory if categories is None else categories)
        states = sum(n_bytes for (category, _), n_bytes in self.states.items() if category in wanted)
        most, live = states if phase is None else 0, states
        for number, category, n_bytes in zip(self.at, self.which.category, self.changes, strict=True):
            if category in wanted:
                live += n_bytes
            if live > most and (phase is None or self.program.instructions[number].phase is phase):
                most = live
        return most

    @cached_property
    def times_s(self) -> list[float]:
        """(n,), when the device comes to each change: an alloc or free when its stream gets there, a change by an
        operation at its start or end. The CPU has made it earlier (`cpu_s`).

        Raises:
            ValueError: the profile was made of a program alone.
        """
        return self._times(device=True)

    @cached_property
    def cpu_s(self) -> list[float]:
        """(n,), when the CPU makes each change; ascending."""
        return self._times(device=False)

    def timeline(self, header: Header | Callable[[], Header], ranks: Iterable[int] | None = None) -> Timeline:
        """Operations of the given ranks, of all by default, and with them every change of their memory: the run's own
        timeline says FSDP's alone.

        What lives through all steps is allocated first, at the start of the run. Times are the device's.

        Raises:
            ValueError: the profile was made of a program alone, or a rank was not played.
        """
        if self.run is None:
            raise ValueError("this profile was made of a program, which has no times; give memory() a run of it")
        return self.run.recorded(self.which.rows(self.run.on_cpu), self._sizes, header, ranks)

    def _sizes(self) -> list[int]:
        return [*self.states.values(), *map(abs, self.changes)]

    @cached_property
    def pools(self) -> Pools:
        """What the caching allocator makes of it: active and reserved bytes."""
        if self.allocator is None:
            return Pools(self.peak_bytes, self.peak_bytes, {})
        return pools(self.program, self.work, self.run, self.allocator)

    @property
    def needs_times(self) -> bool:
        """Whether what the allocator holds depends on when things happen (``record_stream``)."""
        return needs_times(self.program)

    @property
    def active_bytes(self) -> int:
        """The most bytes at one moment that are alive or, freed, may not be reused yet (``record_stream``)."""
        return self.pools.active_bytes

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that the allocator holds of the device: what ``torch.cuda.max_memory_reserved`` reports."""
        return self.pools.reserved_bytes

    def _times(self, *, device: bool) -> list[float]:
        if self.run is None:
            raise ValueError("this profile was made of a program, which has no times; give memory() a run of it")
        columns, rank = self.run.columns, 0
        clock, start, end = (self.run.of_rank(c, rank) for c in (columns.clock_s, columns.start_s, columns.end_s))
        ops = self.program.numbers
        at_start, at_end = dict(zip(ops, start if device else clock, strict=True)), dict(zip(ops, end, strict=True))
        numbers, cpu, reached = self.run.memory_times(rank)
        at_start |= dict(zip(numbers, reached if device else cpu, strict=True))
        late = self.which.at_end if device else [False] * len(self.at)
        return [at_end[n] if e else at_start[n] for n, e in zip(self.at, late, strict=True)]


def memory(
    what: Program | Run, workload: Workload | None = None, *, foreach_optimizer: bool | None = None
) -> MemoryProfile:
    """The bytes alive on a rank through a program.

    Parameters and optimizer states are there from the beginning: the states are created in the first step and stay, so
    that is how every other step sees them.

    Args:
        what: a program, or a run of it, which adds the times.
        workload: what the segments keep and need. Without it: parameters, states and FSDP's buffers alone.
        foreach_optimizer: the optimizer works on all parameters at once (``optimizer_impl``, unless it is said here);
            for AdamW that takes one more number for each parameter while it runs.

    Raises:
        ValueError: the workload says nothing of a segment that the program computes.
    """
    run = what if isinstance(what, Run) else None
    program = run.program if run else what
    assert isinstance(program, Program)
    states = program.state_bytes
    moment = 0
    optimizer = OPTIMIZERS[program.plan.optimizer]
    foreach = program.plan.optimizer_impl == "foreach" if foreach_optimizer is None else foreach_optimizer
    if foreach and optimizer.foreach_temporary:
        kept = program.once(
            "bytes of the optimizer", lambda: sum([b for (of, _), b in states.items() if of is Memory.OPTIMIZER])
        )
        moment = kept * optimizer.foreach_temporary // optimizer.states
    work = workload.work if workload is not None else None
    return MemoryProfile(program, states, changes_of(program, workload, moment), run, work)
