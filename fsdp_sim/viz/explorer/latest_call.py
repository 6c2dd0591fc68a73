"""`LatestCall`: calls that come faster than they can be answered are coalesced, and the latest wins."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Argument = TypeVar("Argument")


class LatestCall(Generic[Argument]):
    """Calls a function with the newest argument, one call at a time.

    A widget's callback may run on any thread, also while another one is running. A call that comes meanwhile replaces
    the one that waits, and the thread that is busy makes it when it is done. So the last one is always made.
    """

    def __init__(self, function: Callable[[Argument], None]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._next: list[Argument] = []
        self._running = False

    @property
    def waiting(self) -> bool:
        """Whether a newer argument waits already, so that what is only a detail of this one may be left out."""
        return bool(self._next)

    def __call__(self, argument: Argument) -> None:
        with self._lock:
            self._next = [argument]
            if self._running:
                return
            self._running = True
        while True:
            with self._lock:
                if not self._next:
                    self._running = False
                    return
                now = self._next.pop()
            try:
                self._function(now)
            except BaseException:
                with self._lock:
                    self._running = False
                raise
