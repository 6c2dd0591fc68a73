"""`Latest`: of wishes that come faster than they can be met, the last one is met, and none twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Wish = TypeVar("Wish")


class Latest(Generic[Wish]):
    """Calls a function with the newest wish, one call at a time.

    A callback of a widget may run on any thread, also while another one is being served. A wish that comes meanwhile
    replaces the one that waits; the thread that is serving takes it up when it is done. So the last always lands.
    """

    def __init__(self, serve: Callable[[Wish], None]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._next: list[Wish] = []
        self._serving = False

    @property
    def waiting(self) -> bool:
        """Whether a newer wish waits already, so that what is only a detail of this one may be left out."""
        return bool(self._next)

    def __call__(self, wish: Wish) -> None:
        with self._lock:
            self._next = [wish]
            if self._serving:
                return
            self._serving = True
        while True:
            with self._lock:
                if not self._next:
                    self._serving = False
                    return
                now = self._next.pop()
            try:
                self._serve(now)
            except BaseException:
                with self._lock:
                    self._serving = False
                raise
