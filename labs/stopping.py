"""How a run is asked to stop before its last step, and how long it may take to do so.

A rank that left in the middle of a step would make the others fail in their next collective. So a wish to stop is
noted, travels to all ranks with the loss, and all leave after the same step, with a checkpoint.

[Note: who hears a signal]  Python runs signal handlers in the main thread, between two of its instructions, and the
main thread may be stuck in a collective whose other ranks are dead. So a thread of its own listens
(`signal.set_wakeup_fd`).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GRACE_S = 25.0
"""From SIGTERM to the end of the save; torchrun kills after 30 s."""

PATIENCE_S = 5.0
"""How long the step may still take, unless steps take long: then three of them. Who does not get to the end of a step
waits for a rank that is dead."""

PREEMPTED = 75
"""Exit status after SIGTERM (EX_TEMPFAIL of sysexits.h): saved, to be gone on with."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as the shell's own."""

_LOOK_S = 0.5


class Stopping:
    """Whether this rank has been asked to stop, and by what.

    Attributes:
        status: the exit status that the wish asks for; 0 as long as there is none.
        why: in words.
        saving: set by the trainer while it writes its last checkpoint: the step has ended.
    """

    def __init__(self) -> None:
        self.status = 0
        self.why = ""
        self.saving = False
        self._patience_s = PATIENCE_S
        self._asked_s = float("inf")
        self._over = threading.Event()

    def step_took(self, step_s: float) -> None:
        self._patience_s = max(PATIENCE_S, 3 * step_s)

    def ask(self, status: int, why: str) -> None:
        """Note a wish; SIGTERM wins over Ctrl-C."""
        if self.status != PREEMPTED and status != self.status:
            self.status, self.why = status, why
            if status == PREEMPTED:
                self._asked_s = time.monotonic()

    def watch(self, signals: socket.socket, parent: int | None) -> None:
        """What the thread does: hear signals, notice that the launcher is gone, leave when it takes too long."""
        signals.settimeout(_LOOK_S)
        while not self._over.is_set():
            try:
                heard = signals.recv(1)
            except TimeoutError:
                heard = b""
            if heard and heard[0] in ASKED_BY:
                self.ask(*ASKED_BY[heard[0]])
            if parent is not None and os.getppid() != parent:
                self.ask(PREEMPTED, "the launcher is gone")
            waited_s = time.monotonic() - self._asked_s
            if waited_s > (GRACE_S if self.saving else min(self._patience_s, GRACE_S)):
                what = "saving" if self.saving else "the step"
                print(f"labs.train: {self.why}, and {what} did not end within {waited_s:.0f} s: left without it",
                      file=sys.stderr, flush=True)  # fmt: skip
                os._exit(PREEMPTED)


ASKED_BY: dict[int, tuple[int, str]] = {
    signal.SIGINT: (INTERRUPTED, "Ctrl-C"),
    signal.SIGTERM: (PREEMPTED, "SIGTERM came"),
}


@contextmanager
def stopping(*, launched: bool) -> Iterator[Stopping]:
    """Inside, SIGINT, SIGTERM and the death of the launcher ask for a stop at the end of the step.

    torchrun starts ranks as processes of their own: killed by SIGKILL it leaves them behind, and only they can notice.
    The third Ctrl-C interrupts as usual (torchrun may pass on what the terminal has sent already).

    Args:
        launched: a launcher started this process, and is to be watched.
    """
    wish, pressed = Stopping(), 0

    def handle(signum: int, frame: Any) -> None:
        nonlocal pressed
        pressed += signum == signal.SIGINT
        if pressed > 2:
            signal.default_int_handler(signum, frame)

    hears, tells = socket.socketpair()
    tells.setblocking(False)
    before = {number: signal.signal(number, handle) for number in ASKED_BY}
    wakeup = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    watcher = threading.Thread(target=wish.watch, args=(hears, os.getppid() if launched else None), daemon=True)
    watcher.start()
    try:
        yield wish
    finally:
        wish._over.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        watcher.join()
        hears.close()
        tells.close()
