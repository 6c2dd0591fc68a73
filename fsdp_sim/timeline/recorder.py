"""Where a running program writes its events: the mini-FSDP and the process groups of `fsdp_sim.ranks` share one.

A recorder belongs to one process (one rank). Operations that finish later (collectives) are opened with
`begin` and closed with `end` by whoever learns when they ran. Nothing is recorded until `start` is called, and
then a call costs about a microsecond.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from fsdp_sim.timeline.call_sites import calls, located
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import Lane, Memory, Op, Phase, lane_of


class Recorder:
    """Collects the events of this process in issue order.

    Attributes:
        on: whether events are kept.
        step, micro_batch, phase: written into each event; whoever drives the training loop moves them.
        unit: the unit the next collective is for, when the caller knows (see `label`).
        opened: ``seq`` of the next collective's event, when the caller has opened it and will end it; -1 when not.
        session: counts the calls of `start`, so that what began in one recording can tell that another has begun.
        observers: entered when a recording starts and left when it stops: they tell what a program does that does not
            tell it itself.
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.on = False
        self.step = 0
        self.micro_batch = 0
        self.phase = Phase.NONE
        self.unit = ""
        self.opened = -1
        self.session = 0
        self.observers: list[Callable[[], AbstractContextManager[object]]] = []
        self._attached = ExitStack()
        self._rows: list[dict[str, Any]] = []
        self._earlier = 0  # events of earlier recordings

    def __reduce__(self) -> tuple[Any, ...]:
        """A recorder sent to another process is that process's own: it stands for a place, not for its content."""
        return _this_process, ()

    def start(self, rank: int | None = None) -> None:
        """Forget earlier events and keep those that follow."""
        self._attached.close()
        self.rank = self.rank if rank is None else rank
        self.session += 1
        self._earlier += len(self._rows)
        self._rows = []
        self.step = self.micro_batch = 0
        self.phase = Phase.NONE
        self.on = True
        for observer in self.observers:
            self._attached.enter_context(observer())

    def stop(self) -> list[Event]:
        """Stop recording and return the events, operations that never ended left out."""
        self.on = False
        self._attached.close()
        return self.events()

    def events(self) -> list[Event]:
        return [Event(**row | located(row["stack"])) for row in self._rows if row["end_s"] is not None]

    def begin(self, op: Op, unit: str, *, waits_on: tuple[int, ...] = (), **fields: Any) -> int:
        """Open an event issued (and, unless `end` says otherwise, started) now.

        Returns:
            the number by which `end` and ``waits_on`` know it, -1 when off. No two recordings of a process share one,
            so what began in another recording is not taken for an event of this one.
        """
        if not self.on:
            return -1
        row = {
            "rank": self.rank, "op": op, "unit": unit, "lane": lane_of(op), "step": self.step,
            "micro_batch": self.micro_batch, "phase": self.phase, "end_s": None,
            "waits_on": tuple(s - self._earlier for s in waits_on if s >= self._earlier),
        } | fields  # fmt: skip
        if "stack" not in row:
            row["stack"] = calls(sys._getframe(1))
        now = time.monotonic()
        row.setdefault("issue_s", now)
        row.setdefault("start_s", now)
        # Nothing from here on makes an object, so the garbage collector cannot write a free in between.
        seq = row["seq"] = len(self._rows)
        self._rows.append(row)
        return self._earlier + seq

    def end(self, seq: int, *, start_s: float | None = None, end_s: float | None = None) -> None:
        """Close an event at ``end_s`` (now by default)."""
        if seq < self._earlier:
            return
        row = self._rows[seq - self._earlier]
        row["end_s"] = time.monotonic() if end_s is None else end_s
        if start_s is not None:
            row["start_s"] = start_s

    @contextmanager
    def span(self, op: Op, unit: str, **fields: Any) -> Iterator[int]:
        """Record what runs inside the block as one operation."""
        seq = self.begin(op, unit, **fields)
        try:
            yield seq
        finally:
            self.end(seq)

    def memory(self, op: Op, category: Memory, unit: str, n_bytes: int, lane: Lane = Lane.COMPUTE) -> None:
        """Record an ``alloc`` or ``free`` of ``n_bytes`` now."""
        seq = self.begin(op, unit, bytes=n_bytes, category=category, lane=lane)
        if seq >= 0:
            row = self._rows[seq - self._earlier]
            row["end_s"] = row["issue_s"]

    @contextmanager
    def label(self, unit: str, opened: int = -1) -> Iterator[None]:
        """Name the unit of the collectives issued inside the block (for the timeline and for the watchdog).

        Args:
            opened: the event of the collective, where it is open already: its process group then opens none.
        """
        before = self.unit, self.opened
        self.unit, self.opened = unit, opened
        try:
            yield
        finally:
            self.unit, self.opened = before


RECORDER = Recorder()
"""The recorder of this process. A rank has one CPU timeline, so it has one recorder."""


def _this_process() -> Recorder:
    return RECORDER
