"""The wire of the pretended cluster: how long a collective takes there, and how a stream is held that long.

The collectives of one communicator queue up in the order of their issue, whatever stream they are on, as NCCL's do.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed as dist

from fsdp_sim.cost.collectives import collective_s
from fsdp_sim.simulation import Simulation
from fsdp_sim.timeline import Op
from labs.cluster.pretend.recorder import PretendedTape
from labs.cluster.pretend.streams import Arrival, Clocks, Event


class Message(NamedTuple):
    """What a collective carries.

    Attributes:
        n_bytes: an all-gather's output, a reduce-scatter's input, an all-reduce's buffer.
        moved_bytes: written and read on this device in its place.
        stride: from one rank of the group to the next.
    """

    op: Op
    unit: str
    n_bytes: int
    moved_bytes: int
    group_size: int
    communicator: str
    stride: int = 1


Seconds = Callable[[Message], float]
"""How long a message takes on the wire."""


def instant(message: Message) -> float:
    """A wire that takes no time: what remains is the device's own work."""
    return 0.0


def seconds_on(simulation: Simulation) -> Seconds:
    """The wire of the simulation's cluster, with the cost model of its collectives."""
    fraction = simulation.costs.calibration.link_fraction

    def seconds(message: Message) -> float:
        alone_s = collective_s(
            message.op.lower(), message.n_bytes, message.group_size, simulation.cluster, stride=message.stride
        )
        return alone_s / fraction

    return seconds


class PretendedWire(Protocol):
    """Carries messages on the current stream."""

    def carry(self, message: Message, move: Callable[[], object], async_op: bool = False) -> dist.Work | None:
        """Move the bytes, and hold the stream until the wire is done; asynchronous: return a handle instead."""


class ClockWire:
    """On CPUs: the stream's clock is set to when the wire is done. The bytes are moved by the thread, before that."""

    def __init__(self, seconds: Seconds, clocks: Clocks, tape: PretendedTape) -> None:
        self.seconds, self.clocks, self.tape = seconds, clocks, tape
        self._free_s: dict[str, float] = {}  # when each communicator is

    def carry(self, message: Message, move: Callable[[], object], async_op: bool = False) -> dist.Work | None:
        issue_s = time.monotonic()
        move()
        stream = self.clocks.current_stream()
        start_s = max(time.monotonic(), stream.done_s, self._free_s.get(message.communicator, 0.0))
        end_s = self._free_s[message.communicator] = start_s + self.seconds(message)
        self.tape.collective(
            message.op, message.unit, message.n_bytes, message.group_size, issue_s, start_s, end_s
        )  # fmt: skip
        gathered = message.unit if message.op is Op.ALL_GATHER else ""
        if not async_op:
            stream.done_s, stream.gathered = end_s, gathered
            return None
        event = Event(self.clocks)
        event.done_s, event.gathered = end_s, gathered
        return Arrival(event)


class GpuWire:
    """On a GPU: a kernel spins on the stream for the modelled time, less what moving the bytes takes.

    The spinning kernel occupies one thread of one multiprocessor, so compute beside it is not slowed down as it is by
    NCCL's. Untested without a GPU.
    """

    def __init__(self, seconds: Seconds, tape: PretendedTape) -> None:
        self.seconds, self.tape = seconds, tape
        self.cycles_per_s, self.copied_bytes_per_s = _spin_rate(), _copy_rate()
        self._free: dict[str, torch.cuda.Event] = {}  # reached when each communicator is free
        self._stream: torch.cuda.Stream = torch.cuda.Stream()  # of asynchronous collectives, as a process group has

    def carry(self, message: Message, move: Callable[[], object], async_op: bool = False) -> dist.Work | None:
        current = torch.cuda.current_stream()
        stream = self._stream if async_op else current
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            if (free := self._free.get(message.communicator)) is not None:
                stream.wait_event(free)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            move()
            left_s = self.seconds(message) - message.moved_bytes / self.copied_bytes_per_s
            if left_s > 0:
                torch.cuda._sleep(int(left_s * self.cycles_per_s))
            end.record(stream)
        self._free[message.communicator] = end
        self.tape.collective(
            message.op, message.unit, message.n_bytes, message.group_size, start, start, end
        )  # fmt: skip
        return GpuArrival(end) if async_op else None


class GpuArrival(dist.Work):
    """The handle of an asynchronous collective on a GPU: the current stream waits, the CPU goes on."""

    def __init__(self, end: torch.cuda.Event) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: Any = None) -> bool:
        torch.cuda.current_stream().wait_event(self.end)
        return True

    def is_completed(self) -> bool:
        return bool(self.end.query())


SPUN_CYCLES = 20_000_000
COPIED_BYTES = 2**28


@functools.cache
def _spin_rate() -> float:
    """Cycles per second of `torch.cuda._sleep`, at the clock that the GPU runs at after some work."""
    return SPUN_CYCLES / _median_s(lambda: torch.cuda._sleep(SPUN_CYCLES))


@functools.cache  # once: its buffers would be in the peak of a step that is measured later
def _copy_rate() -> float:
    """Bytes written per second by a copy within the GPU."""
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
    return COPIED_BYTES / _median_s(lambda: target.copy_(source))


def _median_s(work: Callable[[], object], repeats: int = 5) -> float:
    work()
    times_s = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times_s.append(float(begin.elapsed_time(end)) * 1e-3)
    return statistics.median(times_s)
