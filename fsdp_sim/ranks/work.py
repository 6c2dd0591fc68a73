"""The handle of a collective on the board, and what the handles of one rank share."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed.distributed_c10d as c10d

from fsdp_sim.ranks.board import RankBoard, Record
from fsdp_sim.ranks.network import Wire
from fsdp_sim.timeline import RECORDER

NO_TIMEOUT = timedelta(0)  # what torch passes for it


class Context:
    """What the groups of this rank share; set once, by `install`."""

    board: RankBoard
    rank: int
    wire: Wire
    serial: bool = False
    lock = threading.Lock()  # held while a collective is announced: threads of a rank may issue them
    new_groups: ClassVar[Counter[int]] = Counter()  # groups created so far, by who creates them
    unfinished: queue.SimpleQueue[WatchedWork] = queue.SimpleQueue()


@dataclass(frozen=True)
class Ticket:
    """A collective between its record on the board and its handle."""

    index: int  # of the record
    record: Record
    seq: int  # of its event in the recorder
    own_event: bool  # whether the group opened that event, or its caller did (the mini-FSDP opens its own)


class WatchedWork(c10d.Work):
    """The handle of a collective on the board. ``start_s`` and ``end_s`` are known once `wait` has returned."""

    def __init__(self, ticket: Ticket, inner: Any) -> None:
        super().__init__()
        self.ticket, self.inner = ticket, inner
        self.start_s = self.end_s = 0.0
        self._done = False
        self._lock = threading.RLock()
        self.finished_s = 0.0  # when gloo was done, if someone noticed before `wait`
        if ticket.record.is_collective and ticket.seq >= 0:  # recorded: else nobody asks when it ended
            Context.unfinished.put(self)

    def wait(self, timeout: Any = None) -> bool:
        if not self._done:
            with Context.board.waiting(Context.rank, self.ticket.index), self._lock:
                if not self._done:
                    self.inner.wait(timeout or NO_TIMEOUT)
                    self._finish()
                    self._done = True
        return True

    def _finish(self) -> None:
        """Learn when it ran, and hold the caller until the modelled wire is done with it."""
        self.start_s, self.end_s = Context.wire.span(self.ticket.record)
        if (left_s := self.end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self.end_s = max(self.end_s, self.finished_s or time.monotonic())  # gloo itself may be slower than the wire
        if self.ticket.own_event:
            RECORDER.end(self.ticket.seq, start_s=self.start_s, end_s=self.end_s)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        if not self._done and self.inner.is_completed() and self._wire_is_done():
            self.wait()
        return self._done

    def _wire_is_done(self) -> bool:
        span = Context.wire.span_if_known(self.ticket.record)
        return span is not None and span[1] <= time.monotonic()

    def get_future(self) -> torch.futures.Future:
        """A future that a thread completes once it has waited: the watchdog and the wire see waits, not futures."""
        future: torch.futures.Future = torch.futures.Future()

        def complete() -> None:
            try:
                self.wait()
                future.set_result(self.inner.get_future().wait())
            except Exception as error:
                future.set_exception(error)

        threading.Thread(target=complete, daemon=True).start()
        return future

    def result(self) -> Any:
        return self.inner.result()

    def _source_rank(self) -> int:
        return self.inner._source_rank()


def note_ends() -> None:
    """Runs in a thread: notes when each collective is done, so that one that ends early is not drawn long.

    Never after its owner has waited for it: gloo's reduce-scatter writes its output again at every ``wait``.
    """
    while True:
        work = Context.unfinished.get()
        with contextlib.suppress(RuntimeError), work._lock:
            if not work._done:
                work.inner.wait()
                work.finished_s = time.monotonic()
        del work
