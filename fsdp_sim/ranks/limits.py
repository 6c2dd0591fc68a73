"""What code one does not trust may use, and who looks after it.

The kernel enforces what it can (seconds of CPU, bytes of memory and of files), set in the rank before the function is
called. Wall time, threads, processes and the memory of all of them are counted from outside, by the parent, which ends
the ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from fsdp_sim.ranks.other_user import OtherUser

PR_SET_CHILD_SUBREAPER = 36  # Linux: what a rank starts stays below it, also when a process in between ends
KNOWS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")  # else psutil looks at every process
LOOK_S = 0.1
ROUNDS = 100
LENT_BYTES, LENT_FILES = 64 * 2**20, 2000


@dataclass(frozen=True)
class Limits:
    """For each rank.

    Attributes:
        cpu_s: seconds of computing, which do not run while others use the cores.
        wall_s: seconds of the whole call.
        memory_bytes: of data of one process, torch's own included (about 0.3 GB); and of what a rank and all that it
            has started have in memory together.
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
    sys.dont_write_bytecode = True  # else a compiled module that is cut short would be loaded ever after
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.user is not None:  # whose tasks are all of this call; of other users the kernel would count every program
        resource.setrlimit(resource.RLIMIT_NPROC, (limits.tasks * world_size,) * 2)


def keep_children() -> None:
    """From now on what this process starts stays below it, also when a process in between ends. On Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_first() -> None:
    """Where the machine has no memory left, the kernel ends this process and what it starts before any other that has
    less than half of it: some memory counts as nobody's, such as that of files which are on their way through a socket.
    On Linux. What root does with CAP_SYS_RESOURCE, code of another user cannot undo."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


class LimitMonitor:
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
        if any(map(_is_large, self.limits.user.lent if self.limits.user else ())):
            return f"wrote more than {LENT_BYTES >> 20} MiB or {LENT_FILES:,} files into the folder it was lent", -1
        for rank, pid in enumerate(self.pids):
            every = [pid, *below(pid)]
            if sum(map(_threads, every)) > self.limits.tasks:
                return f"started more than {self.limits.tasks} threads and processes", rank
            if memory_bytes(every) > self.limits.memory_bytes:
                return f"used more than {self.limits.memory_bytes / 2**30:g} GiB of memory with all it started", rank
        return None


def end_groups(leaders: list[int]) -> None:
    """Kill processes that lead sessions of their own, and all that they have started, wherever it is by now.

    They are stopped first, so that they start nothing more. What loses its parent goes to its leader (see
    `keep_children`), so another look finds it.
    """
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGSTOP)
    for _ in range(ROUNDS):
        escaped = [pid for leader in leaders for pid in below(leader) if _is_outside(pid, leader)]
        if not escaped:
            break
        for pid in escaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    for leader in leaders:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)


def end_tree(root: int) -> None:
    """Kill a process and all that it has started."""
    for pid in (root, *below(root)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_marked(name: str, value: str) -> None:
    """Kill the processes of this user that were started with this variable in their environment: what was below a rank
    that has ended is below it no more."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(name) == value:
                process.kill()


def _is_large(folder: str) -> bool:
    """Whether a folder that was lent holds more than it may. What is in it may be anything, and go meanwhile."""
    files = total = 0
    for place, folders, names in os.walk(folder):
        files += len(folders) + len(names)
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
        if files > LENT_FILES or total > LENT_BYTES:
            return True
    return False


def _is_outside(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) != group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, OSError):
        return False


def below(pid: int) -> list[int]:
    """What a process has started, and what that has, and so on."""
    found = [pid]
    for parent in found:
        found += _children(parent)
    return found[1:]


def _children(pid: int) -> list[int]:
    if not KNOWS_CHILDREN:
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children()]
        return []
    pids: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return pids


def _threads(pid: int) -> int:
    try:
        return psutil.Process(pid).num_threads()
    except psutil.Error:
        return 0


def memory_bytes(pids: list[int]) -> int:
    """What a rank and all below it have in memory, beyond what it was forked with, which is shared. Files that have no
    name any more, and `memfd_create`'s, are memory too."""
    if not pids or not os.path.exists(f"/proc/{pids[0]}/status"):
        return 0  # it has ended, or this is not Linux
    counted = (
        "RssAnon",
        "VmSwap",
        "VmPTE",
    )  # page tables too: a terabyte of nothing that is looked at has 2 GB of them
    of_server = _sum_of(status_bytes(psutil.Process(pids[0]).ppid()), counted)
    found = list(map(status_bytes, pids))
    own = sum(max(0, _sum_of(one, counted) - of_server) for one in found)
    mapped = sum(one.get("RssShmem", 0) for one in found)
    nameless = {place: size for pid in pids for place, size in _nameless_files(pid)}
    return own + max(mapped, sum(nameless.values()))  # a nameless file may also be mapped


def status_bytes(pid: int | str) -> dict[str, int]:
    """Sizes of a process (``VmSize``, ``RssAnon``, ...) by the kernel's names; none where it does not say."""
    with contextlib.suppress(OSError):
        lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return {name: int(size.split()[0]) * 1024 for name, _, size in lines if size.endswith(" kB")}
    return {}


def _sum_of(sizes: dict[str, int], names: tuple[str, ...]) -> int:
    return sum(sizes.get(name, 0) for name in names)


def _nameless_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Which files without a name a process has open, and the bytes that they take."""
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{number}")
                if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                    yield (found.st_dev, found.st_ino), found.st_blocks * 512


def written_bytes(pid: int) -> int | None:
    """Bytes that a process has written so far, to sockets and files, by the kernel's count; None if it does not say."""
    try:
        return psutil.Process(pid).io_counters().write_chars
    except (psutil.Error, AttributeError, OSError):
        return None
