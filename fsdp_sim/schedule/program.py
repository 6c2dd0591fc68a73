"""`Program`: a training step as the list of what the CPU issues, in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory, Op, Phase


class Kind(StrEnum):
    """What an instruction does; the first word of its line."""

    OP = "op"  # enqueue a kernel, copy or collective on a stream
    WAIT = "wait"  # a stream waits for an event
    WAIT_STREAM = "wait_stream"  # a stream waits for all issued on another so far
    RECORD = "record"  # a stream records an event
    ALLOC = "alloc"  # at CPU time, for use on a stream
    FREE = "free"
    HOOK = "hook"  # entry of one of FSDP's runtime hooks
    CPU_SYNC = "cpu_sync"  # the CPU blocks on an event
    CPU_BLOCK = "CPU_BLOCK"  # FSDP1: the rate limiter blocks the CPU on an event
    RECORD_STREAM = "record_strm"  # FSDP1: memory freed just before is kept until this stream has passed here


class Instruction(NamedTuple):
    """One thing the CPU issues. A tuple, because a step has thousands.

    Attributes:
        lane: the stream it is issued on; None for a hook.
        op: of an op; ALLOC or FREE for those; OTHER for the rest.
        unit: the unit it is for; for FWD, BWD and RECOMPUTE the segment.
        bytes: a collective's whole message, a copy's data, or the size of the buffer.
        group_size, communicator: of a collective; collectives of one communicator run in issue order.
        reduce_op: AVG for a reduce-scatter.
        event: number of the event recorded or waited for; of an asynchronous collective, the event at its end.
        event_lane: the stream that records it.
        other: the stream ``wait_stream`` waits for.
        hook: name of the hook entered.
        category: what an alloc, free or record_stream is for.
        detail: the rest of an op's line, for example ``by 4.0``.
        async_op: the collective runs on a stream of its process group, which first waits for ``lane``; ``lane`` goes on.
    """

    kind: Kind
    step: int
    micro_batch: int
    phase: Phase
    lane: Lane | None = None
    op: Op = Op.OTHER
    unit: str = ""
    bytes: int = 0
    group_size: int = 1
    communicator: str = ""
    reduce_op: str = ""
    dtype: str = ""
    event: int = 0
    event_lane: Lane | None = None
    other: Lane | None = None
    hook: str = ""
    category: Memory = Memory.NONE
    detail: str = ""
    async_op: bool = False

    @property
    def what(self) -> str:
        """The last column of its line."""
        if self.kind is Kind.OP:
            if self.op in (Op.FWD, Op.BWD):
                return f"{self.op} {self.unit}"
            name = f"{self.op}({self.unit})" if self.unit else str(self.op)
            group = f" n={self.group_size}" if self.communicator else ""
            return name + group + (f" op={self.reduce_op}" if self.reduce_op else "")
        if self.kind in (Kind.ALLOC, Kind.FREE):
            return f"{self.category}({self.unit})"
        if self.kind is Kind.HOOK:
            return f"{self.hook}({self.unit})" if self.unit else self.hook
        return str(self.other) if self.kind is Kind.WAIT_STREAM else f"e{self.event}@{self.event_lane}"

    @property
    def line(self) -> str:
        """Kind in columns 0 to 11, stream in 12 to 27, then what."""
        return f"{self.kind:<12}{self.lane or '-':<16}{self.what}"

    @property
    def mark(self) -> str:
        """The line that opens its part of the step."""
        if self.phase is Phase.OPTIMIZER:
            return f"--- step {self.step}: {self.phase}"
        return f"--- step {self.step} microbatch {self.micro_batch}: {self.phase}"


@dataclass(frozen=True)
class Program:
    """Instructions in CPU-issue order, and what they were built from."""

    units: tuple[Unit, ...]
    plan: Plan
    world_size: int
    instructions: tuple[Instruction, ...]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    @property
    def ops(self) -> tuple[Instruction, ...]:
        """The instructions that take time."""
        return tuple(i for i in self.instructions if i.kind is Kind.OP)

    def lines(self) -> list[str]:
        """The program in the line format of the recordings of torch, so that the two can be diffed.

        Whole gradients are left out: autograd allocates them, and a recording of FSDP does not see it.
        """
        out: list[str] = []
        mark = ""
        for instruction in self.instructions:
            if instruction.category is Memory.UNSHARDED_GRAD:
                continue
            if instruction.mark != mark:
                mark = instruction.mark
                out.append(mark)
            out.append(instruction.line)
        return out
