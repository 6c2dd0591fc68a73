"""The board: what each rank is doing, in memory that outlives it.

One file, mapped by every rank and read by the parent. A rank writes a record *before* it issues a collective and a
flag while it waits for one, so that the parent can say what a rank was doing even after it was killed. Records
are a ring; a rank that runs more than a ring ahead of the parent waits for it (it never does in practice).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RING = 2048  # records kept per rank

RECORD = np.dtype(
    [
        ("op", "S24"),
        ("unit", "S72"),
        ("detail", "S32"),  # reduce op, root or peer
        ("dtype", "S16"),
        ("source", "S256"),  # file:line of the learner's code
        ("numel", "i8"),
        ("group", "i8"),  # the same number on every rank of a group
        ("group_seq", "i8"),  # counts the collectives of that group on this rank
        ("members", "u8"),  # bit mask of ranks
        ("issue_s", "f8"),  # CLOCK_MONOTONIC, one clock for all processes of a machine
        ("cost_s", "f8"),  # seconds on the modelled wire; 0 without one
    ]
)
STATUS = np.dtype(
    [
        ("issued", "i8"),  # records written so far
        ("read", "i8"),  # records the parent has read
        ("waiting", "i8"),  # index of the record waited for, or -1
        ("debugged", "i8"),  # 1 while the rank's main thread sits in a debugger
        ("began_s", "f8"),  # when the process had come as far as to write here
        ("ready_s", "f8"),  # when the process group had done its first all-reduce
        ("progress", "i8"),
        ("total", "i8"),
        ("asked", "i8"),  # how often the rank has asked the parent to look at it, see `looks`
        ("looked", "i8"),  # how often the parent has
    ]
)


class Record(NamedTuple):
    """One collective of one rank, as its rank described it before issuing it."""

    op: str
    unit: str
    detail: str
    dtype: str
    source: str
    numel: int
    group: int
    group_seq: int
    members: tuple[int, ...]
    issue_s: float
    cost_s: float

    @property
    def is_collective(self) -> bool:
        """Whether all members take part in order (sends and receives pair up instead)."""
        return self.op not in ("send", "recv")

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be the same on all members of the group."""
        return self.op, self.unit, self.detail, self.dtype, self.numel


def ranks_of(mask: int) -> tuple[int, ...]:
    """The ranks whose bits are set in ``mask``."""
    return tuple(rank for rank in range(64) if mask >> rank & 1)


class BoardError(Exception):
    """A rank has written what only the ranks' own code writes, or has cut the file short."""


def _record(*row: Any) -> Record:
    texts = (text.decode("utf-8", "replace") for text in row[:5])
    values: tuple[Any, ...] = (*texts, *row[5:8], ranks_of(row[8]), *row[9:])
    return Record(*values)


class RankBoard:
    """The mapped file, in a rank."""

    def __init__(self, path: str | Path, world_size: int, mode: str = "r+") -> None:
        self.world_size = world_size
        self._lock = threading.Lock()  # the threads of a rank write one after the other
        self._waits: list[int] = []  # the records they wait for
        status_bytes = STATUS.itemsize * world_size
        self.status = np.memmap(path, STATUS, mode, 0, (world_size,))  # type: ignore[call-overload]
        self.records = np.memmap(path, RECORD, mode, status_bytes, (world_size, RING))  # type: ignore[call-overload]

    @classmethod
    def create(cls, path: str | Path, world_size: int) -> RankBoard:
        size = STATUS.itemsize * world_size + RECORD.itemsize * world_size * RING
        Path(path).write_bytes(bytes(size))  # really written: a full disk is an OSError here, not a SIGBUS later
        board = cls(path, world_size)
        board.status["waiting"] = -1
        return board

    # ------------------------------------------------------------------ a rank writes

    def post(self, rank: int, record: Record) -> int:
        """Write a record and return its index. Of a text too long the end is kept: it says more than the beginning."""
        texts = (text.encode()[-RECORD[place].itemsize :] for place, text in enumerate(record[:5]))
        row = (*texts, *record[5:8], sum(1 << r for r in record.members), *record[9:])
        with self._lock:
            index = self.issued(rank)
            while index - int(self.status["read"][rank]) >= RING - 1:
                time.sleep(0.001)
            self.records[rank, index % RING] = row
            self.status["issued"][rank] = index + 1  # last, so that a reader never sees half a record
        return index

    @contextlib.contextmanager
    def waiting(self, rank: int, index: int) -> Iterator[None]:
        """Show that the rank waits for a record; of several that its threads wait for, the latest."""
        with self._lock:
            self._waits.append(index)
            self.status["waiting"][rank] = max(self._waits)
        try:
            yield
        finally:
            with self._lock:
                self._waits.remove(index)
                self.status["waiting"][rank] = max(self._waits, default=-1)

    # ------------------------------------------------------------------ anyone reads

    def issued(self, rank: int) -> int:
        return int(self.status["issued"][rank])

    def read(self, rank: int, first: int, last: int) -> list[Record]:
        """Records ``first`` up to, not including, ``last`` of a rank."""
        rows = self.records[rank, np.arange(first, last) % RING].tolist()
        return [_record(*row) for row in rows]


class BoardView:
    """The file as the parent sees it. It reads it and maps nothing: where a rank cuts a mapped file short, whoever
    looks at it dies.

    Attributes:
        status: of all ranks, as it was at the last `refresh`.
    """

    def __init__(self, path: str | Path, world_size: int, sources: bool = True) -> None:
        """Args:
        sources: whether records say which file issued them. Lines of that file are quoted, so code of another user
            must not be believed: it would read what only this process may.
        """
        self.world_size, self._sources = world_size, sources
        self._taken = [0] * world_size  # records, per rank
        self._file = os.open(path, os.O_RDWR)
        self.refresh()

    def close(self) -> None:
        os.close(self._file)

    def refresh(self) -> None:
        """Look at what the ranks are doing now.

        Raises:
            BoardError: what is written there cannot be.
        """
        status = np.frombuffer(self._bytes(STATUS.itemsize * self.world_size, 0), STATUS)
        for rank, issued in enumerate(status["issued"].tolist()):
            if not 0 <= issued - self._taken[rank] <= RING:
                raise BoardError(f"rank {rank} has overwritten the count of its collectives")
        self.status = status

    def issued(self, rank: int) -> int:
        return int(self.status["issued"][rank])

    def take(self, rank: int) -> list[Record]:
        """The records that this has not returned yet; the rank may overwrite them from now on."""
        first, last = self._taken[rank], self.issued(rank)
        if first == last:
            return []
        records = self._records(rank, first, last)
        self._taken[rank] = last
        self._write(rank, "read", last)
        return records

    def answer(self, rank: int, looked: int) -> None:
        """Tell a rank how often it has been looked at."""
        self._write(rank, "looked", looked)

    def latest(self, rank: int, first: int = 0) -> list[Record]:
        """The records of a rank from ``first`` on that have not been overwritten."""
        return self._records(rank, max(first, self.issued(rank) - RING), self.issued(rank))

    def _records(self, rank: int, first: int, last: int) -> list[Record]:
        rows: list[tuple[Any, ...]] = []
        while first < last:  # once, and once more where the ring begins anew
            count = min(last - first, RING - first % RING)
            place = STATUS.itemsize * self.world_size + RECORD.itemsize * (RING * rank + first % RING)
            rows += np.frombuffer(self._bytes(RECORD.itemsize * count, place), RECORD).tolist()
            first += count
        records = [_record(*row) for row in rows]
        return records if self._sources else [record._replace(source="") for record in records]

    def _write(self, rank: int, name: str, value: int) -> None:
        os.pwrite(self._file, STATUS[name].type(value).tobytes(), STATUS.itemsize * rank + _offset_of(name))

    def _bytes(self, count: int, place: int) -> bytes:
        data = os.pread(self._file, count, place)
        if len(data) < count:
            raise BoardError("a rank has cut short the file in which the ranks say what they do")
        return data


def _offset_of(name: str) -> int:
    assert STATUS.fields is not None
    return STATUS.fields[name][1]
