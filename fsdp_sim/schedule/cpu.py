"""`Cpu`: the one thread that issues. Each method appends one instruction."""

from __future__ import annotations

from typing import Any

from fsdp_sim.schedule.program import Instruction, Kind
from fsdp_sim.timeline import Lane, Memory, Op, Phase, lane_of

# The stream whose pool a buffer comes from. Memory freed returns to that stream's pool (torch.cuda caching allocator).
POOL = {
    Memory.AG_OUTPUT: Lane.AG_COPY_IN,
    Memory.UNSHARDED: Lane.COMPUTE,
    Memory.UNSHARDED_GRAD: Lane.COMPUTE,
    Memory.RS_INPUT: Lane.COMPUTE,
    Memory.RS_OUTPUT: Lane.REDUCE_SCATTER,
}


class Cpu:
    """Issues instructions in order and numbers events.

    Attributes:
        step, micro_batch, phase: written into each instruction; whoever drives the training loop moves them.
    """

    def __init__(self) -> None:
        self.step = 0
        self.micro_batch = 0
        self.phase = Phase.NONE
        self.instructions: list[Instruction] = []
        self._lane_of_event: list[Lane] = []

    def _issue(self, kind: Kind, **fields: Any) -> None:
        self.instructions.append(
            Instruction(kind=kind, step=self.step, micro_batch=self.micro_batch, phase=self.phase, **fields)
        )

    def op(self, op: Op, unit: str, **fields: Any) -> None:
        self._issue(Kind.OP, lane=lane_of(op), op=op, unit=unit, **fields)

    def record(self, lane: Lane) -> int:
        """Record a new event on a stream and return its number, from 1."""
        self._lane_of_event.append(lane)
        event = len(self._lane_of_event)
        self._issue(Kind.RECORD, lane=lane, event=event, event_lane=lane)
        return event

    def wait(self, lane: Lane, event: int) -> None:
        self._issue(Kind.WAIT, lane=lane, event=event, event_lane=self._lane_of_event[event - 1])

    def wait_stream(self, lane: Lane, other: Lane) -> None:
        self._issue(Kind.WAIT_STREAM, lane=lane, other=other)

    def alloc(self, category: Memory, unit: str, n_bytes: int, dtype: str) -> None:
        fields = {"category": category, "unit": unit, "bytes": n_bytes, "dtype": dtype}
        self._issue(Kind.ALLOC, op=Op.ALLOC, lane=POOL[category], **fields)

    def free(self, category: Memory, unit: str, n_bytes: int, dtype: str) -> None:
        fields = {"category": category, "unit": unit, "bytes": n_bytes, "dtype": dtype}
        self._issue(Kind.FREE, op=Op.FREE, lane=POOL[category], **fields)

    def hook(self, name: str, unit: str = "") -> None:
        self._issue(Kind.HOOK, hook=name, unit=unit)
