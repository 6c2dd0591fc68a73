"""How a run is asked to stop before its last step, and how long it may take to do so.

A rank that left in the middle of a step would make the others fail in their next collective. So a request to stop
is noted, travels to all ranks with the loss, and all leave after the same step, with a checkpoint.

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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

GRACE_S = 25.0
"""From SIGTERM to the end of the save; torchrun kills after 30 s."""

PATIENCE_S = 5.0
"""How long a step may still take after SIGTERM, unless steps take long: then three of them. Who does not get to the end
of a step waits for a rank that is dead."""

PREEMPTED = 75
"""Exit status after SIGTERM (EX_TEMPFAIL of sysexits.h): saved, to be gone on with."""

PREEMPTED_MARK = "PREEMPTED"
"""A file in the run's folder: it was told to leave, and has saved. torchrun's own exit status does not say so."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as the shell's own."""

_LOOK_S = 0.5
_ONE_PRESS_S = 0.2  # signals within it are one press


class StopRequest:
    """Whether this rank has been asked to stop, and by what.

    Attributes:
        status: the exit status that was asked for; 0 as long as there is none.
        why: by what, as in "stopped by SIGTERM".
    """

    def __init__(self) -> None:
        self.status = 0
        self.why = ""
        self._takes_longer = False
        self._patience_s = PATIENCE_S
        self._asked_s = self._patience_from_s = float("inf")
        self._over = threading.Event()

    def step_took(self, step_s: float) -> None:
        self._patience_s = max(PATIENCE_S, 3 * step_s)

    @contextmanager
    def longer_than_a_step(self) -> Iterator[None]:
        """Around what may take longer than a step, a save or an evaluation: it has all of `GRACE_S`."""
        before, self._takes_longer = self._takes_longer, True
        try:
            yield
        finally:
            self._patience_from_s = time.monotonic()  # first: the other thread looks
            self._takes_longer = before

    def ask(self, status: int, why: str) -> None:
        """Note a request; SIGTERM wins over Ctrl-C."""
        if self.status != PREEMPTED and status != self.status:
            if status == PREEMPTED:
                self._asked_s = self._patience_from_s = time.monotonic()
            self.why = why
            self.status = status  # last: the trainer reads it in another thread

    def reason(self, status: int) -> str:
        """By what the run is stopped when all ranks have agreed on an exit status; empty for 0."""
        if status == 0:
            return ""
        return self.why if status == self.status else f"{REASONS[status]} to another rank"

    def _late(self, waited_s: float) -> bool:
        in_step_s = 0.0 if self._takes_longer else time.monotonic() - self._patience_from_s
        return waited_s > GRACE_S or (waited_s > 0 and in_step_s > self._patience_s)

    def watch(self, signals: socket.socket, parent: int | None) -> None:
        """What the thread does: hear signals, notice that the launcher is gone, leave when it takes too long."""
        signals.settimeout(_LOOK_S)
        while not self._over.is_set():
            try:
                heard = signals.recv(1)
            except TimeoutError:
                heard = b""
            if heard and heard[0] in ASKED_BY:
                status = ASKED_BY[heard[0]]
                self.ask(status, REASONS[status])
            if parent is not None and os.getppid() != parent:
                self.ask(PREEMPTED, "the end of its launcher")
            waited_s = time.monotonic() - self._asked_s
            if self._late(waited_s) and not self._over.is_set():
                what = "what takes longer than a step" if self._takes_longer else "the step"
                with suppress(OSError):  # nobody may be reading
                    print(f"labs.train: asked to stop by {self.why}, and {what} did not end within {waited_s:.0f} s: "
                          "left without it", file=sys.stderr, flush=True)  # fmt: skip
                os._exit(PREEMPTED)


ASKED_BY: dict[int, int] = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: PREEMPTED}
REASONS = {INTERRUPTED: "Ctrl-C", PREEMPTED: "SIGTERM"}


@contextmanager
def stopping(launcher: int | None = None) -> Iterator[StopRequest]:
    """Inside, SIGINT, SIGTERM and the death of the launcher ask for a stop at the end of the step.

    torchrun starts ranks as processes of their own: killed by SIGKILL it leaves them behind, and only they can notice.
    The third Ctrl-C interrupts as usual. What comes at once is one: torchrun passes on what the terminal has sent
    already, and Linux sends the signal of a parent's death (SIGINT, in ranks that torch's agent has forked) once for
    each of the parent's threads.

    Args:
        launcher: the process that started this one, as `os.getppid` said early on, if its end is to be noticed.
    """
    stop_request, pressed, pressed_s = StopRequest(), 0, -_ONE_PRESS_S

    def handle(signum: int, frame: Any) -> None:
        nonlocal pressed, pressed_s
        if signum != signal.SIGINT or time.monotonic() - pressed_s < _ONE_PRESS_S:
            return
        pressed, pressed_s = pressed + 1, time.monotonic()
        if pressed > 2:
            signal.default_int_handler(signum, frame)

    hears, tells = socket.socketpair()
    tells.setblocking(False)
    # In this order: a signal that is handled is heard.
    wakeup = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in ASKED_BY}
    watcher = threading.Thread(target=stop_request.watch, args=(hears, launcher), daemon=True)
    watcher.start()
    try:
        yield stop_request
    finally:
        stop_request._over.set()
        signal.set_wakeup_fd(wakeup)
        tells.close()  # the thread hears that and need not look first
        watcher.join()
        hears.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def mark_preempted(folder: str | None, preempted: bool) -> None:
    """Put `PREEMPTED_MARK` into the run's folder, if it has one, or take it away."""
    if folder:
        mark = Path(folder, PREEMPTED_MARK)
        with suppress(OSError):  # only a mark: the checkpoint is what counts
            mark.touch() if preempted else mark.unlink(missing_ok=True)
