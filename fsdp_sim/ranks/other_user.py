"""Ranks as another user, from whom folders are hidden: for code that one grades and does not trust.

Only root can become another user. Folders are covered in the rank's own view of the file system, and what Python needs
is made reachable in it where it lies in a closed home. Where the kernel does not allow that, as in many containers,
permissions have to keep the user out, and let it in. Either way a rank tries both before it runs anything, and refuses
if it must.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pwd
import random
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

LENT_UIDS = range(61184, 65520)  # those that systemd lends to services without a user of their own (DynamicUser)
CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 1 << 12, 1 << 14, 1 << 18
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
ROUNDS = 100


@dataclass(frozen=True)
class OtherUser:
    """A user that exists for one call.

    Attributes:
        uid: its number, and that of its group. Every process of it is killed when the call is over.
        hidden: folders that it must not be able to read.
    """

    uid: int
    hidden: tuple[str, ...] = ()

    @classmethod
    def lent(cls, *hidden: str | Path) -> OtherUser:
        """A user whom nobody else is.

        Raises:
            PermissionError: this process may not become another user.
        """
        if sys.platform != "linux" or os.geteuid() != 0:
            raise PermissionError("only root, on Linux, can run code as another user: put sudo before the command")
        taken = {entry.pw_uid for entry in pwd.getpwall()} | {uid for _, uid in _uids()}
        uid = random.SystemRandom().choice([uid for uid in LENT_UIDS if uid not in taken])
        return cls(uid, tuple(str(Path(folder).resolve()) for folder in hidden))

    def furnish(self, folder: Path, files: list[str]) -> dict[str, str]:
        """Give the user its files in a job's folder and a home below it. The folder stays root's: what is in it cannot
        be replaced by a link to a file that root would then read.

        Returns:
            the variables of its environment; none of this process's, which may hold a secret.
        """
        folder.chmod(0o711)
        for name in files:
            (folder / name).touch()
            os.chown(folder / name, self.uid, self.uid)
        home = folder / "home"
        home.mkdir(mode=0o700)
        os.chown(home, self.uid, self.uid)
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "LC_ALL") if name in os.environ}
        return kept | {"HOME": str(home), "TMPDIR": str(home), "USER": "graded", "LOGNAME": "graded"}

    def become(self) -> None:
        """Hide the folders and be this user from now on, for good. To be called while there is one thread."""
        libc = ctypes.CDLL(None, use_errno=True)
        os.chdir("/")
        if libc.unshare(CLONE_NEWNS) == 0 and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0:
            _make_reachable(libc)
            for folder in filter(os.path.isdir, self.hidden):
                _cover(libc, folder, b"mode=000,size=4k", MS_RDONLY)
        os.umask(0o077)
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # it may look at itself in /proc, as every process may
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # no program can make it more than it is

    def look(self) -> None:
        """Try to read what is hidden, and what is needed.

        Raises:
            AccessError: the first can be read, or the second cannot; says what would change that.
        """
        for folder in filter(_is_readable, self.hidden):
            raise AccessError(
                f"{folder} can be read by whom it has to be hidden from, and this machine does not let folders be "
                f"covered (CAP_SYS_ADMIN); take it from them: chmod -R go= {folder}"
            )
        for path in needed():
            if not _is_readable(path):
                raise AccessError(
                    f"{path}, which every program here needs, cannot be read by other users; let them: "
                    f"chmod go+rx {path}, and go+x for each folder above it"
                )

    def end(self) -> None:
        """Kill every process of the user, whatever it has done to be left."""
        for _ in range(ROUNDS):
            left = [process for process, uid in _uids() if uid == self.uid]
            if not left:
                return
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)


class AccessError(Exception):
    """What should be hidden can be read, or what is needed cannot."""


def needed() -> list[Path]:
    """The folders from which a rank imports: Python's, those of its packages, and the one with this package."""
    return [Path(folder).resolve() for folder in (sys.base_prefix, sys.prefix, Path(__file__).parents[2])]


def _make_reachable(libc: ctypes.CDLL) -> None:
    """Where a needed folder lies below one that others may not enter, put another in that one's place: empty, but for
    what is needed."""
    below: dict[Path, list[Path]] = {}
    for path in needed():
        gate = next((above for above in reversed(path.parents) if not above.stat().st_mode & stat.S_IXOTH), None)
        if gate is not None:
            below.setdefault(gate, []).append(path)
    os.umask(0o022)
    for gate, paths in below.items():
        kept = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in paths}
        _cover(libc, str(gate), b"mode=711,size=1m", 0)
        for path, descriptor in kept.items():
            path.mkdir(parents=True, exist_ok=True)
            libc.mount(f"/proc/self/fd/{descriptor}".encode(), str(path).encode(), None, MS_BIND | MS_REC, None)
            os.close(descriptor)


def _cover(libc: ctypes.CDLL, folder: str, options: bytes, flags: int) -> None:
    libc.mount(b"none", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV | flags, options)


def _is_readable(folder: str | Path) -> bool:
    try:
        os.listdir(folder)
    except OSError:
        return False
    return True


def _uids() -> Iterator[tuple[psutil.Process, int]]:
    """The processes of this machine that have not ended, and whose they are."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.uids().real
