"""The record of a run: when each operation ran, on which lane, for which unit, and what bytes were alive.

The simulator, the mini-FSDP and (later) the reader of torch profiler traces all produce a `Timeline`; every
figure, check and comparison takes one and does not care who made it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np

from fsdp_sim.timeline.kinds import Lane, Memory, Op, Phase
from fsdp_sim.timeline.limits import EVENT_BYTES, LINE_BYTES, MAX_BYTES, TooLargeError, refuse_beyond, unzipped

VERSION = 1


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One row of a timeline.

    ``seq`` counts a rank's events in the order in which its CPU issued them. "Order" always means issue order
    on a rank, or order within a lane; lanes are never ordered against each other.

    Attributes:
        bytes: for a collective the whole message (all-gather output, reduce-scatter input); for ``alloc`` and
            ``free`` the size of the buffer; 0 for compute.
        issue_s: when the CPU issued it. ``start_s`` and ``end_s``: when it ran.
        waits_on: ``seq`` of the events of this rank it had to wait for, beyond the previous one on its lane.
        source: ``file:line`` that issued it, or empty. Files of the mini-FSDP are named from the package on:
            ``fsdp_sim/mini/group.py:169``.
        stack: ``file:line`` of the calls that led to ``source``, outermost first, where they are known.
        category: what an ``alloc`` or ``free`` is for.
    """

    seq: int
    rank: int
    op: Op
    lane: Lane
    unit: str = ""
    step: int = 0
    micro_batch: int = 0
    phase: Phase = Phase.NONE
    bytes: int = 0
    group_size: int = 1
    dtype: str = ""
    issue_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    waits_on: tuple[int, ...] = ()
    source: str = ""
    stack: tuple[str, ...] = ()
    category: Memory = Memory.NONE

    @property
    def label(self) -> str:
        """``FWD layers.0`` or ``ALL_GATHER(layers.0)``, as the recorded programs print it."""
        if self.op in (Op.FWD, Op.BWD):
            return f"{self.op} {self.unit}"
        return f"{self.op}({self.unit})" if self.unit else str(self.op)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_memory(self) -> bool:
        return self.op in (Op.ALLOC, Op.FREE)


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who made a timeline, on what, with which clock (``simulated`` or ``measured``).

    Attributes:
        memory_limit_bytes: what a rank can allocate on its device; 0 when not known.
    """

    producer: str
    clock: str
    world_size: int
    title: str = ""
    hardware: str = ""
    versions: dict[str, str] = {}
    memory_limit_bytes: int = 0
    version: int = VERSION


class Timeline:
    """Events of one or more ranks, kept sorted by rank and issue order.

    Example:
        >>> from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
        >>> fwd = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=0.5)
        >>> timeline = Timeline(Header(producer="doc", clock="simulated", world_size=1), [fwd])
        >>> timeline.issue_order(rank=0), timeline.span_s
        (['FWD layers.0'], 0.5)
    """

    def __init__(self, header: Header, events: Iterable[Event]) -> None:
        self.header = header
        self.events: tuple[Event, ...] = tuple(sorted(events, key=lambda e: (e.rank, e.seq)))

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __repr__(self) -> str:
        ranks, steps = len(self.ranks), len(self.steps)
        return (
            f"Timeline({self.header.producer}, {self.header.clock}: {len(self)} events, "
            f"{ranks} rank{'s' * (ranks != 1)}, {steps} step{'s' * (steps != 1)}, {self.span_s * 1e3:.1f} ms)"
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({e.rank for e in self.events}))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted({e.step for e in self.events}))

    @cached_property
    def ops(self) -> tuple[Event, ...]:
        """The events that take time: all but ``alloc`` and ``free``."""
        return tuple(e for e in self.events if not e.is_memory)

    @property
    def start_s(self) -> float:
        return min((e.start_s for e in self.ops), default=0.0)

    @property
    def end_s(self) -> float:
        return max((e.end_s for e in self.ops), default=0.0)

    @property
    def span_s(self) -> float:
        return self.end_s - self.start_s

    def select(self, keep: Callable[[Event], bool] | None = None, **fields: object) -> Timeline:
        """The events whose fields have the given values (a tuple, list or set means "one of") and pass ``keep``.

        Raises:
            TypeError: an event has no field of that name.
        """
        if unknown := [name for name in fields if not hasattr(Event, name)]:
            known = ", ".join(Event.__struct_fields__)
            raise TypeError(f"an event has no field {unknown[0]!r}; its fields are {known}")

        def wanted(event: Event) -> bool:
            for name, value in fields.items():
                have = getattr(event, name)
                if have not in value if isinstance(value, (tuple, list, set, frozenset)) else have != value:
                    return False
            return keep is None or keep(event)

        return Timeline(self.header, filter(wanted, self.events))

    def issue_order(self, rank: int) -> list[str]:
        """Labels of a rank's operations in the order in which its CPU issued them."""
        return [e.label for e in self.ops if e.rank == rank]

    def lane_order(self, rank: int, lane: Lane) -> list[str]:
        """Labels of the operations of one lane of one rank, in the order in which they started."""
        on_lane = [e for e in self.ops if e.rank == rank and e.lane == lane]
        return [e.label for e in sorted(on_lane, key=lambda e: (e.start_s, e.seq))]

    def live_bytes(self, rank: int) -> tuple[np.ndarray, dict[Memory, np.ndarray]]:
        """Live bytes after each alloc and free of a rank, in the order in which its device gets there.

        Returns:
            times_s of shape (n,) and, for each category that occurs, bytes of shape (n,).
        """
        changes = sorted((e for e in self.events if e.rank == rank and e.is_memory), key=lambda e: (e.start_s, e.seq))
        times_s = np.array([e.start_s for e in changes])
        signed = np.array([e.bytes if e.op is Op.ALLOC else -e.bytes for e in changes], dtype=np.int64)
        of = np.array([e.category for e in changes])
        present = [category for category in Memory if category in set(of)]
        return times_s, {category: np.cumsum(np.where(of == category, signed, 0)) for category in present}

    def peak_bytes(self, rank: int) -> int:
        """The most bytes alive at one moment on a rank, over all categories recorded.

        Counted in issue order, as torch's caching allocator does: the CPU runs ahead of the device, so that two buffers
        may be alive together although the streams that use them get there one after the other (see `live_bytes`).
        """
        changes = [e.bytes if e.op is Op.ALLOC else -e.bytes for e in self.events if e.rank == rank and e.is_memory]
        return int(np.max(np.cumsum(changes))) if changes else 0

    def to_jsonl(self, path: str | Path) -> None:
        """Write a header line and one line per event."""
        encode = msgspec.json.encode
        Path(path).write_bytes(b"\n".join([encode(self.header), *map(encode, self.events)]) + b"\n")

    @classmethod
    def from_jsonl(cls, path: str | Path, *, max_bytes: int = MAX_BYTES) -> Timeline:
        """Read what `to_jsonl` wrote, plain or gzipped.

        Args:
            max_bytes: how much is read at most, unpacked; see `fsdp_sim.timeline.limits`.

        Raises:
            ValueError: the file is empty, damaged, too large, of another version, or a line is not of the schema, or
                says what cannot be (named).
        """
        header, events = None, []
        decoder = msgspec.json.Decoder(Event)
        number = n_bytes = 0
        try:
            with unzipped(Path(path)) as file:
                while line := file.readline(LINE_BYTES):
                    number, n_bytes = number + 1, n_bytes + max(len(line), EVENT_BYTES)
                    refuse_beyond(Path(path), n_bytes, max_bytes)
                    if header is not None:
                        events.append(checked(decoder.decode(line)))
                        continue
                    header = msgspec.json.decode(line, type=Header)
                    if header.version != VERSION:
                        raise ValueError(f"it has timeline version {header.version}, this code reads version {VERSION}")
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged: {error}; copy it again") from error
        except TooLargeError:
            raise
        except RecursionError:
            raise ValueError(f"{path}, line {number}: it nests deeper than any timeline; it is none") from None
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        if header is None:
            raise ValueError(f"{path} is empty; a timeline starts with a header line, as Timeline.to_jsonl writes it")
        return cls(header, events)


MOST_S = 1e10
MOST_BYTES = 2**62


def checked(event: Event) -> Event:
    """The event, if it can have been: for those that come from a file.

    Raises:
        ValueError: it ends before it starts, or a number is out of all bounds; names the event.
    """
    which = f"event {event.seq} of rank {event.rank} ({event.op} {event.unit[:60]}".rstrip() + ")"
    if not event.is_memory and event.end_s < event.start_s:
        raise ValueError(f"{which} ends at {event.end_s:g} s, before it starts at {event.start_s:g} s; record it again")
    if not all(-MOST_S < time_s < MOST_S for time_s in (event.issue_s, event.start_s, event.end_s)):
        raise ValueError(f"{which} has a time beyond {MOST_S:g} s; times are seconds since the recording began")
    if not (0 <= event.bytes < MOST_BYTES and 0 <= event.rank < 2**31):
        raise ValueError(f"{which} has {event.bytes} bytes; ranks and bytes are numbers from 0 that a machine can have")
    return event
