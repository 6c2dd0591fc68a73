"""`verify`: does every operation of a program find its data, and may every freed byte really be used again?

The program is walked once in issue order. What each stream is known to have seen finished is kept as a vector
clock, the way race detectors do (Lamport 1978, Mattern 1989): a wait merges the clock of the event into the
stream's. An operation is ordered after another only if its stream's clock covers it; the CPU orders nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from fsdp_sim.schedule.program import Instruction, Kind, Program
from fsdp_sim.timeline import Lane, Memory, Op

Clock = Counter  # operations of each lane known to be finished


@dataclass(frozen=True)
class _Use:
    """The ``number``-th operation of a lane touched a buffer."""

    lane: Lane
    number: int
    label: str

    def seen_by(self, clock: Clock) -> bool:
        return clock[self.lane] >= self.number


@dataclass
class _Buffer:
    """What is alive of one category for one unit."""

    pieces: int = 0
    writer: _Use | None = None
    uses: list[_Use] = field(default_factory=list)


READS = {
    Op.ALL_GATHER: Memory.AG_OUTPUT,
    Op.AG_COPY_OUT: Memory.AG_OUTPUT,
    Op.FWD: Memory.UNSHARDED,
    Op.BWD: Memory.UNSHARDED,
    Op.RS_COPY_IN: Memory.UNSHARDED_GRAD,
    Op.REDUCE_SCATTER: Memory.RS_INPUT,
}
WRITES = {
    Op.AG_COPY_IN: Memory.AG_OUTPUT,
    Op.ALL_GATHER: Memory.AG_OUTPUT,
    Op.AG_COPY_OUT: Memory.UNSHARDED,
    Op.BWD: Memory.UNSHARDED_GRAD,
    Op.RS_COPY_IN: Memory.RS_INPUT,
    Op.REDUCE_SCATTER: Memory.RS_OUTPUT,
}


class ProgramError(ValueError):
    """A program that reads what is not there, or frees what is still in use."""


def verify(program: Program) -> None:
    """Check that a program is right whatever its operations cost.

    Every operation finds the buffers it reads alive, written, and finished being written; every buffer that is
    allocated is freed once; memory is reused only after the streams that used it are known to be done; all-gathers
    read shards after the optimizer has written them, and the optimizer reads gradients after they were reduced.

    Raises:
        ProgramError: names the instruction, its step, and what is wrong.
    """
    _Walk(program).run()


class _Walk:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.owner = {segment: unit for unit in program.units for segment in unit.names_of_segments}
        self.clocks: dict[Lane, Clock] = defaultdict(Counter)
        self.events: dict[int, Clock] = {}
        self.buffers: dict[tuple[Memory, str], _Buffer] = defaultdict(_Buffer)
        self.freed: dict[Lane, list[_Use]] = defaultdict(list)  # uses of memory that a lane's pool may hand out again
        self.optimizer: _Use | None = None
        self.shard_reads: list[_Use] = []

    def run(self) -> None:
        steps = {
            Kind.OP: self.op,
            Kind.RECORD: self.record,
            Kind.WAIT: self.wait,
            Kind.WAIT_STREAM: self.wait_stream,
            Kind.ALLOC: self.alloc,
            Kind.FREE: self.free,
        }
        for instruction in self.program:
            if instruction.kind in steps:
                steps[instruction.kind](instruction)
        for (category, unit), buffer in self.buffers.items():
            if buffer.pieces:
                raise ProgramError(f"{category}({unit}) is still alive at the end of the program; it is never freed")

    def op(self, i: Instruction) -> None:
        lane = _lane(i)
        clock = self.clocks[lane]
        use = _Use(lane, clock[lane] + 1, i.what)
        for key in self.read_by(i):
            buffer = self.live(i, key)
            if buffer.writer is None:
                raise _wrong(i, f"reads {key[0]}({key[1]}), which nothing has written")
            self.ordered(i, clock, buffer.writer, f"which writes the {key[0]}({key[1]}) it reads")
            buffer.uses.append(use)
        if i.op is Op.AG_COPY_IN:
            if self.optimizer is not None:
                self.ordered(i, clock, self.optimizer, "which writes the shards it reads")
            self.shard_reads.append(use)
        if i.op is Op.OPTIM:
            for read in self.shard_reads:
                self.ordered(i, clock, read, "which reads the shards it writes")
            self.optimizer = use
        for key in self.written_by(i):
            buffer = self.live(i, key)
            buffer.writer = use
            buffer.uses.append(use)
        clock[lane] += 1

    def read_by(self, i: Instruction) -> list[tuple[Memory, str]]:
        alone = self.program.world_size == 1  # parameters and gradients are copied without a flat G and O
        if i.op is Op.OPTIM:
            return [key for key, b in self.buffers.items() if key[0] is Memory.RS_OUTPUT and b.pieces and not alone]
        category = READS.get(i.op)
        if category is None or (alone and category is Memory.AG_OUTPUT):
            return []
        if i.op in (Op.FWD, Op.BWD):
            return [(category, self.owner[i.unit].name)] if self.owner[i.unit].params else []
        return [(category, i.unit)]

    def written_by(self, i: Instruction) -> list[tuple[Memory, str]]:
        category = WRITES.get(i.op)
        if category is None:
            return []
        if i.op is Op.BWD:
            return [(category, self.owner[i.unit].name)] if self.owner[i.unit].trains(i.unit) else []
        return [(category, i.unit)]

    def live(self, i: Instruction, key: tuple[Memory, str]) -> _Buffer:
        if not self.buffers[key].pieces:
            raise _wrong(i, f"needs {key[0]}({key[1]}), which is not allocated")
        return self.buffers[key]

    def ordered(self, i: Instruction, clock: Clock, before: _Use, why: str) -> None:
        if not before.seen_by(clock):
            raise _wrong(i, f"does not wait for {before.label} on {before.lane}, {why}")

    def record(self, i: Instruction) -> None:
        self.events[i.event] = self.clocks[_lane(i)].copy()

    def wait(self, i: Instruction) -> None:
        if i.event not in self.events:
            raise _wrong(i, f"waits for e{i.event}, which nothing has recorded")
        self.clocks[_lane(i)] |= self.events[i.event]

    def wait_stream(self, i: Instruction) -> None:
        assert i.other is not None
        self.clocks[_lane(i)] |= self.clocks[i.other]

    def alloc(self, i: Instruction) -> None:
        lane = _lane(i)
        for use in self.freed.pop(lane, []):
            self.ordered(i, self.clocks[lane], use, "which used memory that this may be given")
        self.buffers[i.category, i.unit].pieces += 1

    def free(self, i: Instruction) -> None:
        buffer = self.live(i, (i.category, i.unit))
        buffer.pieces -= 1
        self.freed[_lane(i)] += buffer.uses
        if not buffer.pieces:
            del self.buffers[i.category, i.unit]


def _lane(i: Instruction) -> Lane:
    if i.lane is None:
        raise _wrong(i, "has no stream")
    return i.lane


def _wrong(i: Instruction, what: str) -> ProgramError:
    return ProgramError(f"step {i.step} micro-batch {i.micro_batch} {i.phase}: {i.kind} {i.what} {what}")
