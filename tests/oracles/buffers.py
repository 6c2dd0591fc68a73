"""What memory is alive, who wrote it, who used it, and whether it may be used again."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from fsdp_sim.schedule.instruction import Instruction
from fsdp_sim.timeline import Lane, Memory
from tests.oracles.happens_before import Clock, HappensBefore, ProgramError, Use, lane_of, wrong

Key = tuple[Memory, str]  # category and unit
GROWS = frozenset({Memory.UNSHARDED, Memory.UNSHARDED_GRAD, Memory.SHARDED})  # one buffer per parameter, seen as one
MAY_STAY = frozenset({Memory.SHARDED})  # a slice kept from a forward without backward lives until the next


@dataclass(eq=False)
class Buffer:
    """Memory from its allocation to its release.

    Attributes:
        pieces: tensors it consists of.
        holds: what it holds, in the terms of whoever writes it; None before.
    """

    key: Key
    lane: Lane
    dtype: str
    pieces: int
    holds: Any = None
    writer: Use | None = None
    uses: list[Use] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.key[0]}({self.key[1]})"


class Buffers:
    """All that is alive, by category and unit, oldest first."""

    def __init__(self, order: HappensBefore) -> None:
        self.order = order
        self.alive: dict[Key, list[Buffer]] = defaultdict(list)
        self.freed: dict[Lane, list[Use]] = defaultdict(list)  # uses of memory that a lane's pool may hand out again

    def get(self, category: Memory, unit: str) -> Buffer | None:
        """The newest of its kind."""
        some = self.alive.get((category, unit))
        return some[-1] if some else None

    def need(self, i: Instruction, category: Memory, unit: str) -> Buffer:
        buffer = self.get(category, unit)
        if buffer is None:
            raise wrong(i, f"needs {category}({unit}), which is not allocated")
        return buffer

    def read(self, i: Instruction, buffer: Buffer, use: Use, clock: Clock) -> Any:
        """Use what a buffer holds; it must have been written, and be known to be."""
        if buffer.writer is None:
            raise wrong(i, f"reads {buffer}, which nothing has written")
        must_see(i, clock, buffer.writer, f"which writes the {buffer} it reads")
        buffer.uses.append(use)
        return buffer.holds

    def write(self, i: Instruction, buffer: Buffer, use: Use, clock: Clock, holds: Any) -> None:
        """Those who read what it held before must be done, and so must who wrote it."""
        for earlier in buffer.uses:
            if earlier is not use:  # an operation in place reads and writes
                must_see(i, clock, earlier, f"which uses the {buffer} it writes")
        buffer.holds, buffer.writer = holds, use
        buffer.uses.append(use)

    def alloc(self, i: Instruction) -> None:
        lane, key = lane_of(i), (i.category, i.unit)
        for use in self.freed.pop(lane, []):
            must_see(i, self.order.finished_on(lane), use, "which used memory that this may be given")
        some = self.alive[key]
        if some and i.category in GROWS:
            some[-1].pieces += i.tensors
        else:
            some.append(Buffer(key, lane, i.dtype, i.tensors))

    def free(self, i: Instruction, buffer: Buffer) -> None:
        """Give ``count`` tensors of a buffer back to the pool they came from."""
        if buffer.lane is not i.lane:
            raise wrong(i, f"gives memory to the pool of {i.lane} that came from that of {buffer.lane}")
        if buffer.pieces < i.tensors:
            raise wrong(i, f"frees {i.tensors} tensors, but {buffer.pieces} are alive")
        buffer.pieces -= i.tensors
        self.freed[buffer.lane] += buffer.uses
        if not buffer.pieces:
            self.alive[buffer.key].remove(buffer)

    def check_end(self) -> None:
        """What is alive when the program ends should have been freed."""
        for some in self.alive.values():
            for buffer in some:
                if buffer.key[0] not in MAY_STAY:
                    raise ProgramError(f"{buffer} is still alive at the end of the program; it is never freed")


def must_see(i: Instruction, clock: Clock, before: Use, why: str) -> None:
    if not before.seen_by(clock):
        raise wrong(i, f"does not wait for {before.label} on {before.stream}, {why}")
