"""An interrupt (Ctrl-C, a notebook's stop button) that comes at a moment when it does no harm."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """While this is entered, an interrupt is noted, and acted upon by `check` or at the end.

    Raised wherever it arrives, it would leave a rank that was just started, or a folder that was about to be removed:
    people press twice. In another thread than the main one, where Python raises none, it does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None  # the handler that this one stands in for
        self._pending = False

    def __enter__(self) -> Interrupts:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler) and threading.current_thread() is threading.main_thread():
            self._before = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if kind is not KeyboardInterrupt:
            self.check()

    @property
    def pending(self) -> bool:
        """Whether one has come that nobody has acted upon."""
        return self._pending

    def check(self) -> None:
        """Do now what an interrupt does: by default, raise KeyboardInterrupt."""
        if self._pending:
            self._pending = False
            self._before(signal.SIGINT, None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._pending = True
