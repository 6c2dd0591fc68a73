"""`Cpu`: the one thread that issues. Each method appends one instruction.

[Note: speed]  A step of a large model is thousands of instructions, and a sweep builds thousands of steps, so the
methods build the tuple at once, by position: half the time of calling the class with keywords.
"""

from __future__ import annotations

from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.schedule.lines import NOT_RECORDED
from fsdp_sim.timeline import Lane, Memory, Op, Phase, lane_of

# The stream whose pool a buffer comes from. Memory freed returns to that stream's pool (torch.cuda caching allocator).
POOL = {
    Memory.AG_OUTPUT: Lane.AG_COPY_IN,
    Memory.UNSHARDED: Lane.COMPUTE,
    Memory.UNSHARDED_GRAD: Lane.COMPUTE,
    Memory.RS_INPUT: Lane.COMPUTE,
    Memory.RS_OUTPUT: Lane.REDUCE_SCATTER,
    Memory.SHARDED: Lane.COMPUTE,
    Memory.TEMPORARY: Lane.COMPUTE,
}
LANE = {op: lane_of(op) for op in Op}

_new = tuple.__new__
_OP, _WAIT, _WAIT_STREAM, _RECORD, _ALLOC, _FREE, _HOOK, _RECORD_STREAM = (
    Kind.OP, Kind.WAIT, Kind.WAIT_STREAM, Kind.RECORD, Kind.ALLOC, Kind.FREE, Kind.HOOK, Kind.RECORD_STREAM,
)  # fmt: skip
_OTHER, _OP_ALLOC, _OP_FREE, _NO_MEMORY = Op.OTHER, Op.ALLOC, Op.FREE, Memory.NONE


class Cpu:
    """Issues instructions in order and numbers events from 1.

    Attributes:
        step, micro_batch, phase: written into each instruction; whoever drives the training loop moves them.
    """

    def __init__(self) -> None:
        self.step = 0
        self.micro_batch = 0
        self.phase = Phase.NONE
        self.instructions: list[Instruction] = []
        self._append = self.instructions.append
        self._lane_of_event: list[Lane] = []

    def op(
        self,
        op: Op,
        unit: str,
        lane: Lane | None = None,
        bytes: int = 0,
        dtype: str = "",
        detail: str = "",
    ) -> None:
        """A kernel or copy, on the lane given or else the one that FSDP2 runs it on."""
        self._append(
            _new(Instruction, (_OP, self.step, self.micro_batch, self.phase, lane or LANE[op], op, unit, bytes, 1,
                               "", "", dtype, 0, None, None, "", _NO_MEMORY, detail, False, 1, 1))
        )  # fmt: skip

    def compute(self, op: Op, unit: str, bytes: int = 0, dtype: str = "") -> None:
        """What the CPU computes itself, where gradients and shards are offloaded: it issues nothing meanwhile."""
        self.op(op, unit, Lane.CPU, bytes, dtype)
        self.cpu_sync_stream(Lane.CPU, NOT_RECORDED)

    def collective(
        self,
        op: Op,
        unit: str,
        lane: Lane | None = None,
        bytes: int = 0,
        dtype: str = "",
        reduce_op: str = "",
        group_size: int = 1,
        communicator: str = "shard",
        async_op: bool = False,
        stride: int = 1,
    ) -> int:
        """A collective; if asynchronous, returns the number of the event at its end, else 0."""
        lane = lane or LANE[op]
        event = 0
        if async_op:
            self._lane_of_event.append(lane)
            event = len(self._lane_of_event)
        self._append(
            _new(Instruction, (_OP, self.step, self.micro_batch, self.phase, lane, op, unit, bytes, group_size,
                               communicator, reduce_op, dtype, event, None, None, "", _NO_MEMORY, "", async_op, 1,
                               stride))
        )  # fmt: skip
        return event

    def blocking_collective(
        self,
        op: Op,
        unit: str,
        bytes: int,
        dtype: str,
        reduce_op: str,
        group_size: int,
        communicator: str,
        stride: int = 1,
        lane: Lane = Lane.COMPUTE,
    ) -> None:
        """A collective that DTensor asks for, on the stream of its process group: ``lane`` waits for it at once."""
        if group_size > 1:
            end = self.collective(op, unit, lane, bytes, dtype, reduce_op, group_size, communicator, True, stride)
            self.wait(lane, end, f"{op}({unit})" if unit else str(op))

    def record(self, lane: Lane) -> int:
        """Record a new event on a stream and return its number."""
        events = self._lane_of_event
        events.append(lane)
        event = len(events)
        self._append(
            _new(Instruction, (_RECORD, self.step, self.micro_batch, self.phase, lane, _OTHER, "", 0, 1, "", "", "",
                               event, lane, None, "", _NO_MEMORY, "", False, 1, 1))
        )  # fmt: skip
        return event

    def wait(self, lane: Lane, event: int, detail: str = "") -> None:
        """A stream waits for an event; ``detail``: the asynchronous collective that the event is the end of."""
        self._append(
            _new(Instruction, (_WAIT, self.step, self.micro_batch, self.phase, lane, _OTHER, "", 0, 1, "", "", "",
                               event, self._lane_of_event[event - 1], None, "", _NO_MEMORY, detail, False, 1, 1))
        )  # fmt: skip

    def wait_stream(self, lane: Lane, other: Lane) -> None:
        self._append(
            _new(Instruction, (_WAIT_STREAM, self.step, self.micro_batch, self.phase, lane, _OTHER, "", 0, 1,
                               "", "", "", 0, None, other, "", _NO_MEMORY, "", False, 1, 1))
        )  # fmt: skip

    def alloc(
        self,
        category: Memory,
        unit: str,
        n_bytes: int,
        dtype: str,
        lane: Lane | None = None,
        tensors: int = 1,
        detail: str = "",
    ) -> None:
        """Memory, from the pool of the lane given or else of the one that FSDP2 takes it from."""
        self._append(
            _new(Instruction, (_ALLOC, self.step, self.micro_batch, self.phase, lane or POOL[category], _OP_ALLOC, unit,
                               n_bytes, 1, "", "", dtype, 0, None, None, "", category, detail, False, tensors, 1))
        )  # fmt: skip

    def free(
        self,
        category: Memory,
        unit: str,
        n_bytes: int,
        dtype: str,
        lane: Lane | None = None,
        tensors: int = 1,
        detail: str = "",
    ) -> None:
        """Memory goes back to the pool it came from."""
        self._append(
            _new(Instruction, (_FREE, self.step, self.micro_batch, self.phase, lane or POOL[category], _OP_FREE, unit,
                               n_bytes, 1, "", "", dtype, 0, None, None, "", category, detail, False, tensors, 1))
        )  # fmt: skip

    def record_stream(self, category: Memory, unit: str, lane: Lane) -> None:
        """FSDP1: what was freed just before is kept until ``lane`` has passed here."""
        self._append(
            _new(Instruction, (_RECORD_STREAM, self.step, self.micro_batch, self.phase, lane, _OTHER, unit, 0, 1, "",
                               "", "", 0, None, None, "", category, "", False, 1, 1))
        )  # fmt: skip

    def hook(self, name: str, unit: str = "") -> None:
        self._append(
            _new(Instruction, (_HOOK, self.step, self.micro_batch, self.phase, None, _OTHER, unit, 0, 1, "", "", "", 0,
                               None, None, name, _NO_MEMORY, "", False, 1, 1))
        )  # fmt: skip

    def cpu_sync(self, event: int) -> None:
        """The CPU blocks until an event has passed."""
        self._block(Kind.CPU_SYNC, event)

    def cpu_sync_stream(self, lane: Lane, detail: str = "") -> None:
        """The CPU blocks until a stream has done all that was issued on it."""
        self._append(
            _new(Instruction, (Kind.CPU_SYNC, self.step, self.micro_batch, self.phase, lane, _OTHER, "", 0, 1, "", "",
                               "", 0, None, None, "", _NO_MEMORY, detail or lane, False, 1, 1))
        )  # fmt: skip

    def cpu_block(self, event: int) -> None:
        """FSDP1: the rate limiter blocks the CPU until an event has passed."""
        self._block(Kind.CPU_BLOCK, event)

    def _block(self, kind: Kind, event: int) -> None:
        lane = self._lane_of_event[event - 1]
        self._append(
            _new(Instruction, (kind, self.step, self.micro_batch, self.phase, None, _OTHER, "", 0, 1, "", "", "", event,
                               lane, None, "", _NO_MEMORY, "", False, 1, 1))
        )  # fmt: skip
