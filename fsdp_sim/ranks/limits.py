"""What code one does not trust may use, and who looks after it.

The kernel enforces what it can (seconds of CPU, bytes of memory and of files), set in the rank before the function is
called. Wall time, threads and processes are counted from outside, by the parent, which ends the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from dataclasses import dataclass

import psutil

from fsdp_sim.ranks.other_user import OtherUser

PR_SET_CHILD_SUBREAPER = 36  # Linux: what a rank starts stays below it, also when a process in between ends
LOOK_S = 0.1
ROUNDS = 100


@dataclass(frozen=True)
class Limits:
    """For each rank.

    Attributes:
        cpu_s: seconds of computing, which do not run while others use the cores.
        wall_s: seconds of the whole call.
        memory_bytes: of data, torch's own included (about 0.3 GB).
        file_bytes: of one file.
        tasks: threads and processes, those of torch and gloo included (about 20).
        user: who runs the code; None for the user of this process.
    """

    cpu_s: int = 10
    wall_s: float = 60.0
    memory_bytes: int = 2 * 2**30
    file_bytes: int = 256 * 2**20
    tasks: int = 120
    user: OtherUser | None = None


def confine(limits: Limits, world_size: int) -> None:
    """Set the kernel's limits for this process, and for what it starts."""
    resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_s, limits.cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory_bytes, limits.memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.user is not None:  # whose tasks are all of this call; of other users the kernel would count every program
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.tasks * world_size,) * 2)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Overseer:
    """Looks at the ranks ten times a second."""

    def __init__(self, limits: Limits, pids: list[int]) -> None:
        self.limits, self.pids = limits, pids
        self._start_s = self._seen_s = time.monotonic()

    def exceeded(self) -> tuple[str, int] | None:
        """What was exceeded, as the end of a sentence, and by which rank; of the wall time, -1."""
        now_s = time.monotonic()
        if now_s - self._start_s > self.limits.wall_s:
            return f"was still running after {self.limits.wall_s:g} s", -1
        if now_s - self._seen_s < LOOK_S:
            return None
        self._seen_s = now_s
        for rank, pid in enumerate(self.pids):
            if tasks_of(pid, self.limits.tasks) > self.limits.tasks:
                return f"started more than {self.limits.tasks} threads and processes", rank
        return None


def below(pid: int) -> list[psutil.Process]:
    """A process and what it has started, and so on; those that are gone left out."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []


def end_escaped(rank_pid: int) -> None:
    """Kill what a rank has started outside its own process group, which the caller kills.

    The rank and its group are stopped first, so that they start nothing more. What loses its parent goes to the rank
    (see `confine`), so another look finds it.
    """
    try:
        os.killpg(rank_pid, signal.SIGSTOP)
    except (ProcessLookupError, PermissionError):
        return
    for _ in range(ROUNDS):
        escaped = [process for process in below(rank_pid)[1:] if _is_outside(process, rank_pid)]
        if not escaped:
            return
        for process in escaped:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(0.01)


def _is_outside(process: psutil.Process, group: int) -> bool:
    try:
        return os.getpgid(process.pid) != group and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, ProcessLookupError):
        return False


def tasks_of(pid: int, enough: int) -> int:
    """Threads of a process and of all below it; counting ends beyond ``enough``."""
    count = 0
    for process in below(pid):
        try:
            count += process.num_threads()
        except psutil.Error:
            continue
        if count > enough:
            break
    return count


def written_bytes(pid: int) -> int | None:
    """Bytes that a process has written so far, to sockets and files, by the kernel's count; None if it does not say."""
    try:
        return psutil.Process(pid).io_counters().write_chars
    except (psutil.Error, AttributeError, OSError):
        return None
