"""One run at a time in a folder: a lock that the kernel takes back when the process ends, however it ends."""

from __future__ import annotations

import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

import msgspec
from filelock import FileLock, Timeout

LOCK, OWNER = "run.lock", "run.owner.json"


class FolderInUseError(OSError):
    """Another run that is still alive uses the folder."""


class Owner(msgspec.Struct):
    """Who holds the lock; only for the message to who does not get it."""

    pid: int
    host: str
    since: str


class RunLock:
    """Held by rank 0 as long as the run lasts. Files left behind by a dead run lock nothing.

    Source: `filelock.FileLock`, which is flock(2).

    Example:
        >>> with RunLock(Path("/tmp")):
        ...     pass

    Raises:
        FolderInUseError: on entering: another process holds it; says which. OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = FileLock(folder / LOCK, timeout=0, fallback_to_soft=False)

    def __enter__(self) -> RunLock:
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.acquire()
        except NotImplementedError as error:
            raise OSError(
                f"{self.folder} is on a file system without locks (flock), so two runs could meet in it; choose another"
            ) from error
        except Timeout:
            raise FolderInUseError(
                f"{self.folder} is in use by another run ({self._who()}); wait for its end, or choose another folder"
            ) from None
        since = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        owner = self.folder / f"{OWNER}.tmp"
        owner.write_bytes(msgspec.json.encode(Owner(os.getpid(), socket.gethostname(), since)))
        owner.replace(self.folder / OWNER)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._lock.release()

    def _who(self) -> str:
        try:
            owner = msgspec.json.decode((self.folder / OWNER).read_bytes(), type=Owner)
        except (OSError, ValueError):  # it has the lock, and has not written yet who it is
            return "which has just begun"
        return f"process {owner.pid} on {owner.host}, since {owner.since}"
