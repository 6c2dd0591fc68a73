"""The record of a run: when each operation ran, on which lane, for which unit, and what bytes were alive.

The simulator, the mini-FSDP and the reader of torch profiler traces all produce a `Timeline`; every
figure, check and comparison takes one and does not care who made it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fsdp_sim.timeline.columns import FIELDS, Columns
from fsdp_sim.timeline.event import Event, checked
from fsdp_sim.timeline.header import VERSION, Header
from fsdp_sim.timeline.kinds import MEMORY, Lane, Memory, Op
from fsdp_sim.timeline.limits import EVENT_BYTES, LINE_BYTES, MAX_BYTES, TooLargeError, refuse_beyond, unzipped
from fsdp_sim.timeline.written import written

if TYPE_CHECKING:
    import numpy as np


class Timeline:
    """Events of one or more ranks, in order of rank and issue, as columns.

    A reader of one field takes its column (``timeline.columns["start_s"]``); `events` makes an object of each row when
    it is first asked for.

    Args:
        header: what is said of the whole; or a function that says it when it is first asked for.
        events: in any order; or their columns, sorted by rank and seq.

    Example:
        >>> from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
        >>> fwd = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=0.5)
        >>> timeline = Timeline(Header(producer="doc", clock="simulated", world_size=1), [fwd])
        >>> timeline.issue_order(rank=0), timeline.span_s
        (['FWD layers.0'], 0.5)
    """

    def __init__(self, header: Header | Callable[[], Header], events: Iterable[Event] | Columns) -> None:
        self._header = header
        if isinstance(events, Columns):
            self.columns = events
        else:
            self.events = tuple(sorted(events, key=lambda e: (e.rank, e.seq)))
            self.columns = Columns.of(self.events)

    @cached_property
    def header(self) -> Header:
        return self._header() if callable(self._header) else self._header

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every row as an object."""
        return tuple(self.columns.events())

    def __len__(self) -> int:
        return len(self.columns)

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
        return tuple(sorted(set(self.columns["rank"])))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.columns["step"])))

    @cached_property
    def ops(self) -> tuple[Event, ...]:
        """The events that take time: all but ``alloc`` and ``free``."""
        if "events" in self.__dict__:
            return tuple([e for e in self.events if not e.is_memory])
        return tuple(self.columns.operations.events())

    def ops_of(self, rank: int) -> Sequence[Event]:
        """The operations of a rank, in issue order."""
        return self._ops_by_rank.get(rank, ())

    def events_of(self, rank: int) -> Sequence[Event]:
        """The events of a rank, in issue order."""
        return self._events_by_rank.get(rank, ())

    @cached_property
    def _ops_by_rank(self) -> dict[int, Sequence[Event]]:
        return self._by_rank(self.ops)

    @cached_property
    def _events_by_rank(self) -> dict[int, Sequence[Event]]:
        return self._by_rank(self.events)

    def _by_rank(self, events: Sequence[Event]) -> dict[int, Sequence[Event]]:
        if len(self.ranks) == 1:
            return {self.ranks[0]: events}
        found: dict[int, list[Event]] = {rank: [] for rank in self.ranks}
        for e in events:
            found[e.rank].append(e)
        return dict(found)

    @cached_property
    def api(self) -> str:
        """Which way of training it is a step of, as `Plan.api` has it; where the header does not say, by what its
        operations give away. Empty where nothing communicates."""
        found = self.header.api or _api_of(self.ops)
        # FSDP annotates what it does, so what a trace without its annotations gathers, something else does.
        return "" if found == "fsdp2" and not self.header.api and self.header.producer == "torch.profiler" else found

    @property
    def start_s(self) -> float:
        return min((start_s for op, start_s in self.columns.rows("op", "start_s") if op not in MEMORY), default=0.0)

    @property
    def end_s(self) -> float:
        return max((end_s for op, end_s in self.columns.rows("op", "end_s") if op not in MEMORY), default=0.0)

    @property
    def span_s(self) -> float:
        return self.end_s - self.start_s

    def select(self, keep: Callable[[Event], bool] | None = None, **fields: object) -> Timeline:
        """The events whose fields have the given values (a tuple, list or set means "one of") and pass ``keep``.

        Raises:
            TypeError: an event has no field of that name.
        """
        if unknown := [name for name in fields if not hasattr(Event, name)]:
            raise TypeError(f"an event has no field {unknown[0]!r}; its fields are {', '.join(FIELDS)}")
        rows: Iterable[int] = range(len(self))
        for name, value in fields.items():
            column = self.columns[name] if name in FIELDS else [getattr(event, name) for event in self.events]
            wanted = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
            rows = [row for row in rows if column[row] in wanted]
        if keep is not None:
            rows = [row for row in rows if keep(self.events[row])]
        return Timeline(self.header, self.columns.take(list(rows)))

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
        import numpy as np  # which only arrays need

        changes = self.memory_changes(rank)
        times_s = np.array([time_s for time_s, _, _ in changes])
        signed = np.array([n_bytes for _, n_bytes, _ in changes], dtype=np.int64)
        codes = {category: code for code, category in enumerate(Memory)}
        of = np.array([codes[category] for _, _, category in changes])
        present = {category: of == code for category, code in codes.items() if code in of}
        return times_s, {category: np.cumsum(np.where(mine, signed, 0)) for category, mine in present.items()}

    def peak_bytes(self, rank: int) -> int:
        """The most bytes alive at one moment on a rank, over all categories recorded.

        Counted in issue order, as torch's caching allocator does: the CPU runs ahead of the device, so that two buffers
        may be alive together although the streams that use them get there one after the other (see `live_bytes`).
        """
        return max(accumulate(n_bytes for _, n_bytes, _ in self._changes(rank)), default=0)

    def memory_changes(self, rank: int) -> list[tuple[float, int, Memory]]:
        """When, by how many bytes and of which category a rank's memory changes, in the order in which its device gets
        there."""
        return sorted(self._changes(rank), key=lambda change: change[0])  # of one moment, as they were issued

    def _changes(self, rank: int) -> list[tuple[float, int, Memory]]:
        """When, by how many bytes and of which category a rank's memory changes, in issue order."""
        rows = self.columns.rows("rank", "op", "start_s", "bytes", "category")
        return [
            (start_s, n_bytes if op == Op.ALLOC else -n_bytes, category)
            for of, op, start_s, n_bytes, category in rows
            if of == rank and op in MEMORY
        ]

    def to_jsonl(self, path: str | Path) -> None:
        """Write a header line and one line per event."""
        encode = msgspec.json.encode
        with written(path) as new:
            new.write_bytes(b"\n".join([encode(self.header), *map(encode, self.events)]) + b"\n")

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


def timeline_of(what: Any) -> Timeline:
    """A timeline, or the one that something has: what ``simulate`` or ``ranks.run`` returned, or a program.

    Raises:
        TypeError: it has none.
    """
    timeline = getattr(what, "timeline", what)
    if not isinstance(timeline, Timeline):
        raise TypeError(
            f"this takes a Timeline, or what has one (what simulate or ranks.run returned, a program), not a "
            f"{type(what).__name__}; read_timeline reads one from a file"
        )
    return timeline


def _api_of(ops: Iterable[Event]) -> str:
    gathers = [e for e in ops if e.op == Op.ALL_GATHER]
    updated: set[tuple[int, int]] = set()  # ranks and steps whose optimizer has begun
    late = 0  # all-gathers after that
    for e in ops:
        if e.op == Op.OPTIM:
            updated.add((e.rank, e.step))
        elif e.op == Op.ALL_GATHER:
            late += (e.rank, e.step) in updated
    if gathers and late == len(gathers):
        return "zero2" if any(e.op == Op.REDUCE_SCATTER for e in ops) else "zero1"
    if any(e.lane in (Lane.UNSHARD, Lane.PRE_UNSHARD, Lane.POST_BACKWARD) for e in ops):
        return "fsdp1"
    if gathers:
        return "fsdp2"
    return "ddp" if any(e.op == Op.ALL_REDUCE for e in ops) else ""
