"""`memory`: the bytes alive at every moment of a program, by what they are for.

Memory is allocated and freed at the CPU's time, in issue order, whatever the streams do (torch's caching allocator). So
the peak is a matter of order alone; when it comes takes a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fsdp_sim.cost import Workload
from fsdp_sim.engine.activations import SEGMENT_OPS, Activations
from fsdp_sim.engine.allocator import Pools, pools
from fsdp_sim.engine.record import Changes, Rows
from fsdp_sim.engine.run import Run
from fsdp_sim.schedule import Instruction, Kind, Program
from fsdp_sim.timeline import Header, Memory, Op, Phase, Timeline

_CODE = {category: code for code, category in enumerate(Memory)}
_CATEGORIES = tuple(Memory)
_ALLOC, _FREE, _OP = Kind.ALLOC, Kind.FREE, Kind.OP
_ALLOCATES, _FREES = Op.ALLOC, Op.FREE


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
        at: (n,), the number of the instruction that makes each change.
        codes: (n,), the category of each change, as its place in `Memory`.
        changes: (n,), bytes.
        at_end: (n,), whether the change comes at the end of its operation.
        run: when the instructions ran; None if the profile was made of a program alone.
    """

    program: Program = field(repr=False)
    states: dict[tuple[Memory, str], int]
    at: NDArray[np.int64] = field(repr=False)
    codes: NDArray[np.int64] = field(repr=False)
    changes: NDArray[np.int64] = field(repr=False)
    at_end: NDArray[np.bool_] = field(repr=False)
    run: Run | None = field(default=None, repr=False)

    @cached_property
    def bytes(self) -> NDArray[np.int64]:
        """(n,), all bytes alive after each change."""
        return np.cumsum(self.changes) + self.state_bytes

    @cached_property
    def by_category(self) -> dict[Memory, NDArray[np.int64]]:
        """For each category that occurs, (n,): its bytes alive after each change."""
        before = {category: 0 for category in Memory}
        for (category, _), n_bytes in self.states.items():
            before[category] += n_bytes
        found = set(np.unique(self.codes).tolist())
        return {
            category: before[category] + np.cumsum(np.where(self.codes == code, self.changes, 0))
            for category, code in _CODE.items()
            if code in found or before[category]
        }

    @cached_property
    def peak_index(self) -> int:
        """The first change after which most is alive; -1 where nothing ever changes."""
        return int(np.argmax(self.bytes)) if len(self.changes) else -1

    @property
    def state_bytes(self) -> int:
        """Bytes that live through all steps."""
        return sum(self.states.values())

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at one moment: what ``torch.cuda.max_memory_allocated`` reports."""
        return int(self.bytes.max(initial=self.state_bytes))

    @property
    def peak_instruction(self) -> Instruction | None:
        """What was issued when the peak was reached."""
        return self.program.instructions[int(self.at[self.peak_index])] if len(self.changes) else None

    @property
    def peak_s(self) -> float | None:
        """When the peak is reached on the device (see `times_s`); None without a run."""
        return float(self.times_s[self.peak_index]) if self.run is not None and len(self.changes) else None

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
        instructions, names = self.program.instructions, self._unit_of_segment
        upto = slice(0, index + 1)
        for number, code, change in zip(
            self.at[upto].tolist(), self.codes[upto].tolist(), self.changes[upto].tolist(), strict=True
        ):
            i = instructions[number]
            key = (_CATEGORIES[code], names.get(i.unit, i.unit) if i.kind is _OP else i.unit)
            live[key] = live.get(key, 0) + change
        parts = [Part(category, unit, n_bytes) for (category, unit), n_bytes in live.items() if n_bytes]
        return sorted(parts, key=lambda part: -part.bytes)

    def peak_of(self, categories: Iterable[Memory] | None = None, phase: Phase | None = None) -> int:
        """The most bytes of some categories (all by default) alive at one moment of a phase (of all by default)."""
        wanted = set(Memory if categories is None else categories)
        live = np.zeros(len(self.at), dtype=np.int64)
        for category, n_bytes in self.by_category.items():
            if category in wanted:
                live += n_bytes
        if phase is not None:
            instructions = self.program.instructions
            live = live[[instructions[number].phase is phase for number in self.at.tolist()]]
        states = sum(n_bytes for (category, _), n_bytes in self.states.items() if category in wanted)
        return int(live.max(initial=states if phase is None else 0))

    @cached_property
    def times_s(self) -> NDArray[np.float64]:
        """(n,), when the device comes to each change: an alloc or free when its stream gets there, a change by an
        operation at its start or end. The CPU has made it earlier (`cpu_s`).

        Raises:
            ValueError: the profile was made of a program alone.
        """
        return self._times(device=True)

    @cached_property
    def cpu_s(self) -> NDArray[np.float64]:
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
        length = len(self.states) + len(self.run.ops) + len(self.at)
        return self.run.recorded(Rows(self.program, self.run.on_cpu, self._made, self.states, length), header, ranks)

    def _made(self) -> Changes:
        numbers, n_bytes = self.at.tolist(), self.changes.tolist()
        instructions, names = self.program.instructions, self._unit_of_segment
        by = [instructions[number] for number in numbers]
        return Changes(
            numbers,
            [_ALLOCATES if change > 0 else _FREES for change in n_bytes],
            [names.get(i.unit, i.unit) if i.kind is _OP else i.unit for i in by],
            [_CATEGORIES[code] for code in self.codes.tolist()],
            [abs(change) for change in n_bytes],
            [""] * len(numbers),
            self.at_end.tolist(),
        )

    @cached_property
    def pools(self) -> Pools:
        """What the caching allocator makes of it: active and reserved bytes."""
        return pools(self.program, self.states, self.at.tolist(), self.changes.tolist(), self.run)

    @property
    def active_bytes(self) -> int:
        """The most bytes at one moment that are alive or, freed, may not be reused yet (``record_stream``)."""
        return self.pools.active_bytes

    @property
    def reserved_bytes(self) -> int:
        """The most bytes that the allocator holds, if it is never asked to give any back: see `Pools`."""
        return self.pools.reserved_bytes

    @cached_property
    def _unit_of_segment(self) -> dict[str, str]:
        return {segment: unit.name for unit in self.program.units for segment in unit.names_of_segments}

    def _times(self, *, device: bool) -> NDArray[np.float64]:
        if self.run is None:
            raise ValueError("this profile was made of a program, which has no times; give memory() a run of it")
        columns, rank = self.run.columns, 0
        clock, start, end = (self.run.of_rank(c, rank) for c in (columns.clock_s, columns.start_s, columns.end_s))
        ops = [number for number, i in enumerate(self.program.instructions) if i.kind is _OP]
        at_start, at_end = dict(zip(ops, start if device else clock, strict=True)), dict(zip(ops, end, strict=True))
        numbers, cpu, reached = self.run.memory_times(rank)
        at_start |= dict(zip(numbers, reached if device else cpu, strict=True))
        late = self.at_end.tolist() if device else [False] * len(self.at)
        return np.array([at_end[n] if e else at_start[n] for n, e in zip(self.at.tolist(), late, strict=True)])


def memory(what: Program | Run, workload: Workload | None = None, *, foreach_optimizer: bool = False) -> MemoryProfile:
    """The bytes alive on a rank through a program.

    Parameters and optimizer states are there from the beginning: the states are created in the first step and stay, so
    that is how every other step sees them.

    Args:
        what: a program, or a run of it, which adds the times.
        workload: what the segments keep and need. Without it: parameters, states and FSDP's buffers alone.
        foreach_optimizer: the optimizer works on all parameters at once, as torch's does by default on a GPU; for
            AdamW that takes one more number for each parameter while it runs.

    Raises:
        ValueError: the workload says nothing of a segment that the program computes.
    """
    run = what if isinstance(what, Run) else None
    program = run.program if run else what
    assert isinstance(program, Program)
    states = program.state_bytes
    activations = None
    if workload is not None:
        selective = program.plan.activation_checkpointing == "selective"
        activations = Activations(run.ops if run else program.ops, workload.work, selective)
    moment = 0
    if foreach_optimizer and program.plan.optimizer == "adamw":
        moment = sum(b for (category, _), b in states.items() if category is Memory.OPTIMIZER) // 2
    at: list[int] = []
    codes: list[int] = []
    changes: list[int] = []
    ends: list[int] = []  # which changes come at the end of their operation
    code_of, temporary = _CODE, _CODE[Memory.TEMPORARY]
    grad_code = code_of[Memory.UNSHARDED_GRAD]
    grads: list[tuple[int, int]] = []  # allocated whole gradients that the next operation, if a backward, makes
    for number, i in enumerate(program.instructions):
        kind = i.kind
        if kind is _ALLOC and i.category is Memory.UNSHARDED_GRAD and activations is not None:
            grads.append((number, i.bytes))
            continue
        made = 0
        if grads and (kind is _OP or kind is _FREE or kind is _ALLOC):
            if kind is _OP and i.op is Op.BWD:
                made = sum([n_bytes for _, n_bytes in grads])
            else:
                at += [n for n, _ in grads]
                codes += [grad_code] * len(grads)
                changes += [n_bytes for _, n_bytes in grads]
            grads.clear()
        if kind is _ALLOC:
            at.append(number)
            codes.append(code_of[i.category])
            changes.append(i.bytes)
        elif kind is _FREE:
            at.append(number)
            codes.append(code_of[i.category])
            changes.append(-i.bytes)
        elif kind is _OP:
            op = i.op
            if activations is not None and op in SEGMENT_OPS:
                for category, n_bytes, at_end in activations.of(op, i.unit, made):
                    if at_end:
                        ends.append(len(at))
                    at.append(number)
                    codes.append(code_of[category])
                    changes.append(n_bytes)
            elif op is Op.OPTIM and moment:
                at += (number, number)
                codes += (temporary, temporary)
                ends.append(len(changes) + 1)
                changes += (moment, -moment)
    which = np.zeros(len(at), dtype=bool)
    which[ends] = True
    numbers, kinds, sizes = (np.array(column, dtype=np.int64) for column in (at, codes, changes))
    return MemoryProfile(program, states, numbers, kinds, sizes, which, run)
