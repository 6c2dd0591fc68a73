"""`Processes`: some that simulate beside each other, for as long as they are entered."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fsdp_sim.explore.garbage import SELDOM, seldom_collected

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import DefaultContext, ForkContext, SpawnContext

AT_ONCE = 16  # results in a message
_T = TypeVar("_T")
_R = TypeVar("_R")


class Processes:
    """So many processes; one is this one itself.

    They ignore Ctrl-C, which a terminal sends to all of them: whoever leaves them ends them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lanes: list[_Lane] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            if self.count == 1:
                opening.enter_context(seldom_collected())
            else:
                context = _context()
                with _interrupts_ignored():  # which they inherit
                    self._lanes = [_Lane(_started(context, opening)) for _ in range(self.count)]
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def streams(self, function: Callable[..., Iterable[_R]], given: Sequence[Sequence[Any]]) -> list[Iterator[_R]]:
        """What ``function`` yields of each of ``given``, in one process each.

        Raises:
            ChildProcessError: one of them, when it is read: its process has ended.
            Exception: what the function raised.
        """
        if self.count == 1:
            return [iter(function(*one)) for one in given]
        while any(lane.works for lane in self._lanes):  # on what nobody reads any more
            _receive(self._lanes)
        for lane, one in zip(self._lanes, given, strict=True):
            lane.pipe.send((function, one))
            lane.come, lane.works, lane.error = deque(), True, None
        return [_read(lane, self._lanes) for lane in self._lanes]

    def map(self, function: Callable[[_T], _R], given: Sequence[_T]) -> list[_R]:
        """What ``function`` returns of each of ``given``, of which a process has every so many."""
        shares = [(given[place :: self.count],) for place in range(self.count)]
        found = [list(one) for one in self.streams(partial(map, function), shares)]
        return [found[place % self.count][place // self.count] for place in range(len(given))]


HERE = Processes(1)


@dataclass
class _Lane:
    """A process, seen from here: its pipe, what has come through it, whether more will, and what it failed of."""

    pipe: Connection
    come: deque[Any] = field(default_factory=deque)
    works: bool = False
    error: Exception | None = None


def _read(lane: _Lane, lanes: Sequence[_Lane]) -> Iterator[Any]:
    while lane.come or lane.works:
        while lane.come:
            yield lane.come.popleft()
        if lane.works:
            _receive(lanes)
    if lane.error is not None:
        raise lane.error


def _receive(lanes: Sequence[_Lane]) -> None:
    """Wait for what comes next, from whichever lane: a full pipe would stop its process."""
    from multiprocessing.connection import wait  # a browser's Python has none

    ready = wait([lane.pipe for lane in lanes if lane.works])
    for lane in lanes:
        if lane.pipe in ready:
            try:
                some, lane.error = lane.pipe.recv()
            except (EOFError, ConnectionError):
                some, lane.error = [], ChildProcessError("a process that simulated has ended; is all memory used up?")
            lane.come += some
            lane.works = bool(some)


def _serve(pipe: Connection, other_end: Connection) -> None:
    """What a process does: what it is sent, until nobody is there any more."""
    other_end.close()
    gc.freeze()
    gc.set_threshold(*SELDOM)
    while True:
        try:
            function, given = pipe.recv()
        except EOFError:
            return
        error = None
        try:
            results = iter(function(*given))
            while some := list(islice(results, AT_ONCE)):
                pipe.send((some, None))
        except BrokenPipeError:
            return
        except Exception as raised:
            error = raised
        pipe.send(([], error))


def _started(context: DefaultContext | ForkContext | SpawnContext, opening: ExitStack) -> Connection:
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, ours), daemon=True)
    process.start()
    theirs.close()
    opening.callback(process.join)
    opening.callback(process.terminate)
    opening.callback(ours.close)
    return ours


def _context() -> ForkContext | SpawnContext:
    """By fork, at once and with all that is imported, where nothing but this thread is there; else started anew: a
    fork beside threads (numpy's, a notebook's) may hang.
    """
    threads = Path("/proc/self/task")
    alone = threads.is_dir() and len(list(threads.iterdir())) == 1
    return multiprocessing.get_context("fork") if alone else multiprocessing.get_context("spawn")


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
