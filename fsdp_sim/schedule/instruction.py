"""`Instruction`: one thing that the CPU issues in a training step."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_sim.timeline import Lane, Memory, Op, Phase, Word


class Kind(Word):
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
        lane: the stream it is issued on, or that the CPU waits for; None for a hook and for what blocks the CPU on an
            event.
        op: of an op; ALLOC or FREE for those; OTHER for the rest.
        unit: the unit it is for; for FWD, BWD and RECOMPUTE the segment.
        bytes: a collective's whole message, a copy's data, or the size of the buffers.
        group_size, communicator: of a collective; collectives of one communicator run in issue order.
        stride: from one rank of a shard group to the next. For those of any group, ask `stride_among`.
        reduce_op: of a reduction, for example AVG.
        event: number of the event recorded or waited for; of an asynchronous collective, the event at its end.
        event_lane: the stream that records it.
        other: the stream ``wait_stream`` waits for.
        hook: name of the hook entered.
        category: what an alloc, free or record_stream is for.
        detail: the rest of an op's line, for example ``by 4.0``; of a wait for an asynchronous collective, which.
        async_op: the collective runs on a stream of its process group, which first waits for ``lane``; ``lane`` goes
            on.
        tensors: how many an alloc or free stands for (one line each); ``bytes`` is their sum.
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
    tensors: int = 1
    stride: int = 1

    @property
    def what(self) -> str:
        """The last column of its line."""
        match self.kind:
            case Kind.OP:
                if self.op in (Op.FWD, Op.BWD, Op.RECOMPUTE):
                    return f"{self.op} {self.unit}"
                name = f"{self.op}({self.unit})" if self.unit else str(self.op)
                group = f" n={self.group_size}" if self.communicator else ""
                reduce_op = f" op={self.reduce_op}" if self.reduce_op and self.op is Op.REDUCE_SCATTER else ""
                detail = f" {self.detail}" if self.detail else ""
                return name + group + reduce_op + detail + (" async" if self.async_op else "")
            case Kind.ALLOC | Kind.FREE:
                return f"{self.category}({self.unit})"
            case Kind.HOOK:
                return f"{self.hook}({self.unit})" if self.unit else self.hook
            case Kind.WAIT_STREAM:
                return str(self.other)
            case Kind.CPU_BLOCK:
                return f"rate limiter waits for e{self.event}@{self.event_lane}"
            case Kind.RECORD_STREAM:
                return f"tensor kept until {self.lane} passes ({self.unit})"
        return self.detail or f"e{self.event}@{self.event_lane}"

    def stride_among(self, world_size: int) -> int:
        """From one rank of its group to the next: replicas are as far apart as there are ranks in a copy."""
        return max(1, world_size // self.group_size) if self.communicator.startswith("replicate") else self.stride

    @property
    def line(self) -> str:
        """Kind in columns 0 to 11, stream in 12 to 27, then what."""
        lane = None if self.kind is Kind.CPU_SYNC else self.lane
        return f"{self.kind:<12}{lane or '-':<16}{self.what}"
