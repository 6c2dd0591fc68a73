"""A timeline as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open, and back.

A process per rank; in it a thread for each lane, one that says which step it is, one for the phases, one for what the
CPU issues, one for allocations; arrows for what waited for what; a counter for each category of memory. Each event of
the timeline travels whole in the ``args`` of its slice, so that what was written can be read back exactly.

Two rules of the format shape the file. Slices of one thread must not overlap (the viewers drop those that do, without a
word), so a lane whose collectives overlap gets several threads. And the viewers count in whole nanoseconds and round
down, so times are rounded here, start and end alike, and written as numbers that do not fall below by rounding.
"""

from __future__ import annotations

import gzip
import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from fsdp_sim.timeline.event import Event, checked
from fsdp_sim.timeline.header import VERSION, Header
from fsdp_sim.timeline.kinds import Lane, Op
from fsdp_sim.timeline.limits import EVENT_BYTES, MAX_BYTES, TooLargeError, refuse_beyond
from fsdp_sim.timeline.timeline import Timeline
from fsdp_sim.timeline.written import written

FORMAT = "fsdp_sim timeline"  # under "otherData", at the head of the file: how our own traces are known
OPERATION, MEMORY = "operation", "memory"  # the "cat" of what is read back; everything else repeats it for the eye
_STEPS, _PHASES, _ISSUE, _LANES, _ALLOCATIONS = 0, 10, 20, 30, 99_999  # numbers of the first thread of each kind
_THREADS = 100_000  # numbers of threads that a rank may have; they differ from rank to rank
_T = TypeVar("_T")


class Track(msgspec.Struct, Generic[_T], frozen=True):
    """Spans of one thread that do not overlap: of each when it starts and ends (ns), and what it is."""

    spans: list[tuple[int, int, _T]]


def write_chrome(timeline: Timeline, path: str | Path) -> Path:
    """Write a timeline as a Chrome trace; a path that ends in ``.gz`` is compressed.

    It is written rank by rank, so that only the rows of one rank are in memory.

    Returns:
        the path.

    Example:
        >>> import tempfile
        >>> from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
        >>> fwd = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=0.5)
        >>> timeline = Timeline(Header(producer="doc", clock="simulated", world_size=1), [fwd])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     read_chrome(write_chrome(timeline, f"{folder}/step.json.gz")).events == timeline.events
        True
    """
    target, encode = Path(path), msgspec.json.encode
    head = {"format": FORMAT, "version": VERSION, "header": timeline.header}
    with written(target) as new, gzip.open(new, "wb") if target.suffix == ".gz" else new.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(head) + b',"traceEvents":[')
        for number, row in enumerate(_rows(timeline)):
            file.write((b",\n" if number else b"\n") + encode(row))
        file.write(b"\n]}\n")
    return target


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0
    header: Header | None = None


def read_chrome(path: str | Path, *, max_bytes: int = MAX_BYTES) -> Timeline:
    """The timeline that `write_chrome` wrote, event by event as it was.

    Args:
        max_bytes: how much is read at most, unpacked; see `fsdp_sim.timeline.limits`.

    Raises:
        ValueError: the file is no such trace, is of another version, is damaged or too large (named).
    """
    # Not at the top: those who only write need no reader of profiler traces.
    from fsdp_sim.timeline.kineto.stream import EventStream

    decode = msgspec.json.Decoder(Event).decode
    stream, header, events, n_bytes = EventStream(path, max_bytes=max_bytes), None, [], 0
    try:
        for rows in stream:
            header = header or _header(stream.metadata)
            found = [checked(decode(row.args)) for row in rows if row.cat in (OPERATION, MEMORY)]
            n_bytes += len(found) * EVENT_BYTES
            refuse_beyond(Path(path), n_bytes, max_bytes)
            events += found
        header = header or _header(stream.metadata)
    except TooLargeError:
        raise
    except (ValueError, RecursionError) as error:
        why = str(error).removeprefix(f"{path} ").partition("; record with")[0]
        raise ValueError(f"{path} cannot be read as a trace of fsdp_sim: it {why}") from error
    return Timeline(header, events)


def _header(metadata: dict[str, Any]) -> Header:
    """What the head of the file says of the timeline."""
    head = msgspec.convert(metadata.get("otherData", {}), _Head)
    if head.format != FORMAT or head.header is None:
        raise ValueError("was not written by write_chrome, which notes the whole timeline in it")
    if head.version != VERSION:
        raise ValueError(f"has timeline version {head.version}, this code reads version {VERSION}")
    return head.header


def _rows(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The rows of the file, each rank's in order of time."""
    by_rank: dict[int, list[Event]] = {rank: [] for rank in timeline.ranks}
    for event in timeline.events:
        by_rank[event.rank].append(event)
    origin_s = min((min(e.issue_s, e.start_s) for e in timeline.events), default=0.0)
    arrows = 0
    for place, (rank, events) in enumerate(by_rank.items()):
        one = _Rank(rank, place, events, origin_s, arrows)
        yield from one.names()
        yield from one.rows(timeline.header.memory_limit_bytes)
        arrows = one.arrows


class _Rank:
    """The rows of one rank. Process 0 has a meaning of its own for some viewers, so rank 0 is process 1."""

    def __init__(self, rank: int, place: int, events: Sequence[Event], origin_s: float, arrows: int) -> None:
        self.rank, self.events, self.origin_s, self.arrows = rank, events, origin_s, arrows
        self.pid = place + 1
        self.ops = [event for event in events if not event.is_memory]
        self.threads: dict[int, str] = {}
        self.of_event: dict[int, int] = {}  # seq of an operation -> its thread

    def names(self) -> Iterator[dict[str, Any]]:
        """Lay out the threads, and name and sort them."""
        self._slices = [*self._marks(), *self._operations()]
        if any(event.issue_s != event.start_s for event in self.ops):
            self.threads[_ISSUE] = "CPU issues"
        if len(self.ops) < len(self.events):
            self.threads[_ALLOCATIONS] = "alloc and free"
        yield self._name("process", 0, name=f"rank {self.rank}")
        yield self._name("process", 0, sort_index=self.rank)
        for number, name in sorted(self.threads.items()):
            yield self._name("thread", number, name=name)
            yield self._name("thread", number, sort_index=number)

    def rows(self, limit_bytes: int) -> Iterator[dict[str, Any]]:
        """Everything that has a time: lazily, in order of time; at one time slices come before arrows."""
        rows: list[tuple[int, int, int, Any]] = []
        for order, make in enumerate((self._slices, self._issues(), self._memory(limit_bytes), self._waits())):
            rows += ((when, order, k, row) for k, (when, row) in enumerate(make))
        rows.sort(key=lambda row: row[:3])
        for when, _, _, row in rows:
            yield row | {"ts": microseconds(when), "pid": self.pid}

    def _name(self, what: str, number: int, **args: object) -> dict[str, Any]:
        kind = f"{what}_{'name' if 'name' in args else 'sort_index'}"
        return {"ph": "M", "name": kind, "pid": self.pid, "tid": self._tid(number), "args": args}

    def _tid(self, number: int) -> int:
        return self.pid * _THREADS + number

    def ns(self, time_s: float) -> int:
        return round((time_s - self.origin_s) * 1e9)

    def _slice(self, number: int, start: int, end: int, **row: Any) -> tuple[int, dict[str, Any]]:
        return start, {"ph": "X", "dur": microseconds(end - start), "tid": self._tid(number), **row}

    def _operations(self) -> Iterator[tuple[int, dict[str, Any]]]:
        label = {event.seq: event.label for event in self.ops}
        first = _LANES
        for lane in Lane:
            spans = [(self.ns(e.start_s), self.ns(e.end_s), e) for e in self.ops if e.lane is lane]
            for k, track in enumerate(tracks(spans)):
                self.threads[first] = f"{lane}, another at once" if k else str(lane)
                for start, end, event in track.spans:
                    self.of_event[event.seq] = first
                    args = msgspec.to_builtins(event) | {"duration_s": event.duration_s}
                    if event.waits_on:
                        args["waited_for"] = [label.get(seq, f"event {seq}") for seq in event.waits_on]
                    yield self._slice(first, start, end, name=event.label, cat=OPERATION, args=args)
                first += 1

    def _marks(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Slices for steps, and for what computes in the phases of their micro-batches."""
        steps = _extents((f"step {e.step}", self.ns(e.start_s), self.ns(e.end_s)) for e in self.ops)
        several = any(e.micro_batch for e in self.ops)
        computing = [e for e in self.ops if e.phase and e.lane is Lane.COMPUTE]
        phases = _extents(
            (
                (e.step, e.micro_batch, f"{e.phase}, micro-batch {e.micro_batch}" if several else str(e.phase)),
                self.ns(e.start_s),
                self.ns(e.end_s),
            )
            for e in computing
        )
        named = [(start, end, name) for start, end, (_, _, name) in phases]
        for first, what, spans in ((_STEPS, "step", steps), (_PHASES, "phase", named)):
            for k, track in enumerate(tracks(spans)[:10]):  # more at a time nobody could read
                self.threads[first + k] = f"{what}s, another at once" if k else f"{what}s"
                for start, end, name in track.spans:
                    yield self._slice(first + k, start, end, name=name, cat=what)

    def _issues(self) -> Iterator[tuple[int, dict[str, Any]]]:
        if _ISSUE in self.threads:
            for e in self.ops:
                row = {"ph": "i", "s": "t", "name": f"issue {e.label}", "cat": "issue", "tid": self._tid(_ISSUE)}
                yield self.ns(e.issue_s), row

    def _memory(self, limit_bytes: int) -> Iterator[tuple[int, dict[str, Any]]]:
        live: dict[str, int] = {}
        changes = sorted((e for e in self.events if e.is_memory), key=lambda e: (e.start_s, e.seq))
        if changes and limit_bytes:
            yield self.ns(changes[0].start_s), self._counter("memory, limit of the device", limit_bytes)
        for e in changes:
            when = self.ns(e.start_s)
            row = {"ph": "i", "s": "t", "name": f"{e.op} {e.category} {e.unit}".rstrip(), "cat": MEMORY}
            yield when, row | {"tid": self._tid(_ALLOCATIONS), "args": msgspec.to_builtins(e)}
            category = f"memory, {e.category or 'not named'}"
            live[category] = live.get(category, 0) + (e.bytes if e.op is Op.ALLOC else -e.bytes)
            yield when, self._counter(category, live[category])

    def _counter(self, name: str, n_bytes: int) -> dict[str, Any]:
        return {"ph": "C", "name": name, "cat": "live", "args": {"bytes": n_bytes}}

    def _waits(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Arrows, from the last nanosecond of what was waited for to the first of what waited.

        An arrow needs a slice at both ends; an operation of no length has none, and there is no arrow back in time.
        """
        span = {e.seq: (self.ns(e.start_s), self.ns(e.end_s)) for e in self.ops}
        for e in self.ops:
            start, end = span[e.seq]
            for seq in dict.fromkeys(e.waits_on):
                since, until = span.get(seq, (0, 0))
                if end <= start or until <= since or until > start:
                    continue
                self.arrows += 1
                row = {"name": "waited for", "cat": "wait", "id": self.arrows}
                yield until - 1, {"ph": "s", "tid": self._tid(self.of_event[seq]), **row}
                yield start, {"ph": "f", "bp": "e", "tid": self._tid(self.of_event[e.seq]), **row}


def _extents(found: Iterable[tuple[_T, int, int]]) -> list[tuple[int, int, _T]]:
    """From the first start to the last end of each key."""
    spans: dict[_T, tuple[int, int]] = {}
    for key, start, end in found:
        since, until = spans.get(key, (start, end))
        spans[key] = (min(since, start), max(until, end))
    return [(start, end, key) for key, (start, end) in spans.items()]


def tracks(spans: Iterable[tuple[int, int, _T]]) -> list[Track[_T]]:
    """Spans on as few threads as it takes for none to overlap another; what is alone stays on the first.

    Example:
        >>> [[name for *_, name in track.spans] for track in tracks([(0, 5, "a"), (2, 3, "b"), (5, 6, "c")])]
        [['a', 'c'], ['b']]
    """
    found: list[Track[_T]] = []
    free: list[int] = []  # threads on which nothing runs, the first one first
    busy: list[tuple[int, int]] = []  # (until when, thread)
    for start, end, what in sorted(spans, key=lambda span: span[:2]):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        thread = heapq.heappop(free) if free else len(found)
        if thread == len(found):
            found.append(Track([]))
        found[thread].spans.append((start, end, what))
        heapq.heappush(busy, (end, thread))
    return found


def microseconds(ns: int) -> float:
    """Nanoseconds as the format counts, such that a reader that rounds down to whole nanoseconds finds the same."""
    us = ns / 1000
    while int(us * 1000.0) < ns:
        us = math.nextafter(us, math.inf)
    return us
