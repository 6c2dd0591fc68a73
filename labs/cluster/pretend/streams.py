"""Streams that are clocks. torch has streams on CPUs too, which do nothing; FSDP2 takes these for them.

A stream knows when all that was put on it is done. The thread itself is the compute stream: its clock is the time of
day, and to let it wait for an event is to sleep until then. So FSDP2's own waits decide what overlaps, as on a GPU,
but for one thing: the thread that would issue the next all-gather is the one that computes.

FSDP asks for "the device's module" by the name of its type and uses nothing else of the device; see also
`fsdp_sim.measure.recording_streams`, whose streams write down what they are told.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed as dist

from fsdp_sim.timeline import Op
from labs.cluster.pretend.recorder import PretendedTape

FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


class Stream:
    """A queue of the device.

    Attributes:
        done_s: when all that was put on it is done; monotonic clock.
        gathered: the unit of its last all-gather.
    """

    def __init__(self, clocks: Clocks, *, priority: int = 0) -> None:
        self.clocks, self.priority = clocks, priority
        self.done_s = 0.0
        self.gathered = ""

    def wait_event(self, event: Event) -> None:
        if self is self.clocks.compute:
            self.clocks.wait(event)
        else:
            self.done_s = max(self.done_s, event.done_s)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.clocks)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.clocks.wait(self.record_event())


class Event:
    """A place in a stream, and when it is reached."""

    def __init__(self, clocks: Clocks, **options: Any) -> None:
        self.clocks = clocks
        self.done_s = 0.0
        self.gathered = ""

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.clocks.current_stream()
        # Copies are done on this thread, whatever their stream: they are done now.
        self.done_s, self.gathered = max(stream.done_s, time.monotonic()), stream.gathered

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.clocks.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.clocks.wait(self)

    def query(self) -> bool:
        return self.done_s <= time.monotonic()


class Clocks:
    """A device handle like `torch.cpu`, whose streams are clocks.

    Args:
        tape: is told when the thread waits, and when the copies out of what was gathered begin.
    """

    def __init__(self, tape: PretendedTape) -> None:
        self.tape = tape
        self.Stream, self.Event = partial(Stream, self), partial(Event, self)
        self.compute = Stream(self)
        self._current = [self.compute]

    def current_stream(self, device: object = None) -> Stream:
        return self._current[-1]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        self._current.append(stream or self._current[-1])
        try:
            yield
        finally:
            self._current.pop()

    def wait(self, event: Event) -> None:
        """Sleep until an event is reached."""
        if (left_s := event.done_s - time.monotonic()) > 0:
            with self.tape.waiting(then=(Op.AG_COPY_OUT, event.gathered) if event.gathered else None):
                time.sleep(left_s)
        elif event.gathered:
            self.tape.mark(Op.AG_COPY_OUT, event.gathered)

    def current_device(self) -> str:
        return "cpu"

    @contextmanager
    def in_place_of_cpu(self) -> Iterator[None]:
        """Inside, FSDP2's streams on CPUs are these. FSDP2 itself stays as it is."""
        package = importlib.import_module(FULLY_SHARD)
        for found in pkgutil.iter_modules(package.__path__, f"{FULLY_SHARD}."):
            importlib.import_module(found.name)
        with ExitStack() as patches:
            for name, module in list(sys.modules.items()):
                if name.startswith(f"{FULLY_SHARD}.") and hasattr(module, "_get_device_handle"):
                    patches.enter_context(patch.object(module, "_get_device_handle", lambda *_: self))
            patches.enter_context(patch.object(torch.accelerator, "current_stream", self.current_stream))
            yield


class Arrival(dist.Work):
    """The handle of an asynchronous collective: to wait for it is to sleep until the wire is done."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self.event = event

    def wait(self, timeout: Any = None) -> bool:
        self.event.clocks.compute.wait_event(self.event)
        return True

    def is_completed(self) -> bool:
        return self.event.query()
