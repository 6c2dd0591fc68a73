"""Streams, events and a device that do nothing but log the requests they get.

`torch.cuda` and `torch.cpu` are "device handles": modules that offer `Stream`, `Event`, `stream(...)` and
`current_stream()`. FSDP asks for one, and uses nothing else of the device. `Device` is one whose streams write each
request into a `Log`, so that on a laptop, without a GPU, one reads what a GPU would have been told.

[Note: names come last]  A stream has no name when it is made and a buffer no role when it is allocated: which of them
is the all-gather's becomes known later. So a line of the log keeps the objects themselves, and is turned into text
when all is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsdp_sim.schedule import Kind
from fsdp_sim.timeline import Lane, Memory


@dataclass(eq=False)
class Buffer:
    """Memory from one allocation to its release.

    Attributes:
        stream: the one that was current when it was allocated; memory goes back to its allocating stream.
        unit: whose it is, the object that the log's ``name`` can name.
        role: once its use has shown it. Memory that never gets a role is not FSDP's and has no lines.
    """

    stream: Stream
    unit: object
    role: Memory = Memory.NONE


@dataclass(frozen=True)
class LogLine:
    """One action of the CPU. ``what``: pieces of text, and objects to be named at the end."""

    kind: str
    stream: Stream | None
    what: tuple[object, ...]


@dataclass
class Log:
    """The lines so far, and the streams that `Device.stream` has made current, the innermost last."""

    on: bool = True
    lines: list[LogLine] = field(default_factory=list)
    events: int = 0
    current: list[Stream] = field(default_factory=list)

    def write(self, kind: str, stream: Stream | None, *what: object) -> None:
        if self.on:
            self.lines.append(LogLine(kind, stream, what))

    def write_op(self, *what: object) -> None:
        """An operation on the current stream."""
        self.write(Kind.OP, self.current[-1], *what)

    def text(self, name: Callable[[object], str]) -> list[str]:
        """The lines in torch's recorded format: kind in 12 columns, stream in 16, then what.

        Args:
            name: of a unit.
        """
        return [text for line in self.lines if (text := _text(line, name)) is not None]


def _text(line: LogLine, name: Callable[[object], str]) -> str | None:
    if line.kind == "---":
        return "".join(("--- ", *map(str, line.what)))

    def named(piece: object) -> str:
        if isinstance(piece, Buffer):
            return f"{piece.role}({name(piece.unit)})"
        if isinstance(piece, Stream):
            return piece.name or "unnamed"
        return piece if isinstance(piece, str) else name(piece)

    if any(isinstance(piece, Buffer) and not piece.role for piece in line.what):
        return None
    stream = named(line.stream) if line.stream is not None else "-"
    return f"{line.kind:<12}{stream:<16}{''.join(map(named, line.what))}"


class Stream:
    """A queue of a device that writes its waits and records into the log."""

    def __init__(self, log: Log, *, priority: int = 0, name: str = "") -> None:
        self.log = log
        self.priority = priority
        self.name = name

    def wait_event(self, event: Event) -> None:
        self.log.write(Kind.WAIT, self, *event.pieces())

    def wait_stream(self, stream: Stream) -> None:
        self.log.write(Kind.WAIT_STREAM, self, stream)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self.log)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.log.write(Kind.CPU_SYNC, None, self)


def name_streams(owner: object, names: dict[str, Lane]) -> None:
    """Name the streams that are attributes of ``owner``. ``names``: by attribute."""
    for attribute, name in names.items():
        stream = getattr(owner, attribute, None)
        if stream is not None and not stream.name:
            stream.name = name


class Event:
    """A place in a stream. Numbered in the order of recording: ``e7@all_gather``."""

    def __init__(self, log: Log, **options: Any) -> None:
        self.log = log
        self.number = 0
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.log.events += 1
        self.number, self.stream = self.log.events, stream or self.log.current[-1]
        self.log.write(Kind.RECORD, self.stream, *self.pieces())

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self.log.current[-1]).wait_event(self)

    def synchronize(self) -> None:
        self.log.write(Kind.CPU_SYNC, None, *self.pieces())

    def query(self) -> bool:
        return True

    def pieces(self) -> tuple[object, ...]:
        """What names this event: it keeps its number when it is recorded again later."""
        return ("an event never recorded",) if self.stream is None else (f"e{self.number}@", self.stream)


class Device:
    """A device handle like `torch.cuda`, for tensors on the CPU. ``Stream(name="mine")`` has that name in the log."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.Stream = partial(Stream, log)
        self.Event = partial(Event, log)
        log.current = [Stream(log, name=Lane.COMPUTE)]

    def current_stream(self, device: object = None) -> Stream:
        return self.log.current[-1]

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        self.log.current.append(stream or self.log.current[-1])
        try:
            yield
        finally:
            self.log.current.pop()

    def synchronize(self, device: object = None) -> None:
        self.log.write(Kind.CPU_SYNC, None, "device")

    def current_device(self) -> str:
        return "cpu"

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True
