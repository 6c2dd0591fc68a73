"""What is known to be finished when: the order that streams, events and waits impose, and nothing else.

A program is walked once in issue order. What each stream is known to have seen finished is kept as a vector clock, the
way race detectors do (Lamport 1978, Mattern 1989): a wait merges the clock of the event into the stream's. An operation
is ordered after another only if its stream's clock covers it; that the CPU issued it later orders nothing, but what the
CPU has waited for is finished for all that it issues later.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.timeline import Lane

Clock = Counter  # operations of each stream known to be finished
CPU = Lane.CPU


class ProgramError(ValueError):
    """A program that reads what is not there, frees what is still in use, or loses a gradient."""


def wrong(i: Instruction, what: str) -> ProgramError:
    """The error for an instruction, which it names."""
    return ProgramError(f"step {i.step} micro-batch {i.micro_batch} {i.phase}: {i.kind} {i.what} {what}")


@dataclass(frozen=True)
class Use:
    """The ``number``-th operation of a stream."""

    stream: str
    number: int
    label: str

    def seen_by(self, clock: Clock) -> bool:
        return clock[self.stream] >= self.number


class HappensBefore:
    """The clocks. A process group's own stream, of asynchronous collectives, has its communicator's name."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = defaultdict(Counter)
        self.events: dict[int, Clock] = {}

    def issue(self, i: Instruction) -> tuple[Use, Clock]:
        """An operation, and what is finished when it starts."""
        stream: str = lane_of(i)
        if i.async_op:
            stream = f"{i.communicator} process group"
            self.clocks[stream] |= self.clocks[lane_of(i)]
        self.clocks[stream] |= self.clocks[CPU]
        before = self.clocks[stream].copy()
        self.clocks[stream][stream] += 1
        if i.async_op:
            self.events[i.event] = self.clocks[stream].copy()
        return Use(stream, before[stream] + 1, i.what), before

    def record(self, i: Instruction) -> None:
        self.events[i.event] = self.clocks[lane_of(i)].copy()

    def wait(self, i: Instruction) -> None:
        if i.kind is Kind.CPU_SYNC and i.lane:
            self.clocks[CPU] |= self.clocks[i.lane]
            return
        if i.event not in self.events:
            raise wrong(i, f"waits for e{i.event}, which nothing has recorded")
        self.clocks[CPU if i.lane is None else i.lane] |= self.events[i.event]

    def wait_stream(self, i: Instruction) -> None:
        assert i.other is not None
        self.clocks[lane_of(i)] |= self.clocks[i.other]

    def finished_on(self, lane: Lane) -> Clock:
        """What is finished when an operation issued now on this stream starts."""
        return self.clocks[lane] | self.clocks[CPU]


def lane_of(i: Instruction) -> Lane:
    if i.lane is None:
        raise wrong(i, "has no stream")
    return i.lane
