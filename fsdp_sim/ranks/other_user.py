"""Ranks as another user, from whom folders are hidden: for code that one grades and does not trust.

Only root can become another user. In the rank's own view of the file system there are the folders of the system, those
that Python needs, wherever they lie, and empty ones for temporary files; nothing else. Where the kernel does not allow
that, as in many containers, permissions have to keep the user out, and let it in. Either way a rank tries both before
it runs anything, and refuses if it must.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import pwd
import random
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import psutil

LENT_UIDS = range(61184, 65520)  # those that systemd lends to services without a user of their own (DynamicUser)
SYSTEM = {
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/nix",
    "/proc",
    "/sbin",
    "/sys",
    "/usr",
}
TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue")  # where everyone may write
TEMPORARY_SIZE = b"size=64m"  # of each
CLONE_NEWNS, CLONE_NEWIPC = 0x00020000, 0x08000000
NO_IPC = {"shmall": "0", "msgmni": "0", "sem": "0 0 0 0"}  # System V's: its memory counts as no process's
JOIN_SESSION_KEYRING = 1
KEYCTL = {"x86_64": 250, "aarch64": 219, "ppc64le": 271, "s390x": 280, "riscv64": 219}  # the system call's number
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 1 << 12, 1 << 14, 1 << 18
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38
ROUNDS = 100


@dataclass(frozen=True)
class OtherUser:
    """A user that exists for one call.

    Attributes:
        uid: its number, and that of its group. Every process of it is killed when the call is over.
        hidden: folders that it must not be able to read.
        lent: folders that are its own, and that it may write into.
    """

    uid: int
    hidden: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()

    @classmethod
    def unused(cls, *hidden: str | Path) -> OtherUser:
        """A user whom nobody else is.

        Raises:
            PermissionError: this process may not become another user.
        """
        if sys.platform != "linux" or os.geteuid() != 0:
            raise PermissionError("only root, on Linux, can run code as another user: put sudo before the command")
        taken = {entry.pw_uid for entry in pwd.getpwall()} | {uid for _, uid in _uids()}
        uid = random.SystemRandom().choice([uid for uid in LENT_UIDS if uid not in taken])
        return cls(uid, tuple(str(Path(folder).resolve()) for folder in hidden))

    def lending(self, folders: Iterable[str]) -> OtherUser:
        """This user, with some folders and what is in them its own. To be called before any of its code has run."""
        lent = tuple(dict.fromkeys(folders))
        for folder in lent:
            for place, _, files in os.walk(folder):
                for path in (place, *(os.path.join(place, name) for name in files)):
                    os.chown(path, self.uid, self.uid, follow_symlinks=False)
        return replace(self, lent=lent)

    def give_files(self, folder: Path, files: list[str]) -> dict[str, str]:
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

    def become(self, paths: list[Path], folder: Path, control: int) -> None:
        """Hide the folders and be this user from now on, for good. To be called while there is one thread.

        Args:
            paths: the `needed_folders`.
            folder: the job's, which stays where it is.
            control: the descriptor of the rank's connection, the only one that stays open.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        _close_all_but(control)
        os.chdir("/")
        os.umask(0o022)
        alone = libc.unshare(CLONE_NEWNS | CLONE_NEWIPC) == 0
        for name, most in NO_IPC.items() if alone else ():
            with contextlib.suppress(OSError):  # as in many containers
                Path("/proc/sys/kernel", name).write_text(most)
        if alone and libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0:
            _show_only(libc, [*paths, folder, *map(Path, self.lent)])
            _cover(libc, str(folder / "home"), b"mode=700,uid=%d,gid=%d," % (self.uid, self.uid) + TEMPORARY_SIZE, 0)
            for hidden in filter(os.path.isdir, self.hidden):
                _cover(libc, hidden, b"mode=000,size=4k", MS_RDONLY)
        os.umask(0o077)
        os.setgroups([])
        os.setresgid(self.uid, self.uid, self.uid)
        os.setresuid(self.uid, self.uid, self.uid)
        if (keyctl := KEYCTL.get(platform.machine())) is not None:
            libc.syscall(keyctl, JOIN_SESSION_KEYRING, None)  # an empty one: until now it was root's
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # it may look at itself in /proc, as every process may
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)  # no program can make it more than it is

    def check_access(self, paths: Iterable[Path] = ()) -> None:
        """Try to read what is hidden, and what is needed.

        Raises:
            AccessError: the first can be read, or the second cannot; says what would change that.
        """
        for folder in (folder for folder in self.hidden if _is_readable(folder) or os.access(folder, os.X_OK)):
            raise AccessError(
                f"{folder} can be read by whom it has to be hidden from, and this machine does not let folders be "
                f"covered (CAP_SYS_ADMIN); take it from them: chmod -R go= {folder}"
            )
        for path in paths:
            if not _is_readable(path):
                raise AccessError(
                    f"{path}, which every program here needs, cannot be read by other users; let them: "
                    f"chmod go+rx {path}, and go+x for each folder above it"
                )

    def end(self) -> None:
        """Kill every process of the user, whatever it has done to be left, and remove its temporary files."""
        for _ in range(ROUNDS):
            left = [process for process, uid in _uids() if uid == self.uid]
            if not left:
                break
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.01)
        for place in filter(os.path.isdir, TEMPORARY):  # where the rank could not have ones of its own
            for entry in os.scandir(place):
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_uid == self.uid:
                        shutil.rmtree(entry) if entry.is_dir(follow_symlinks=False) else os.unlink(entry)


class AccessError(Exception):
    """What should be hidden can be read, or what is needed cannot."""


def needed_folders() -> list[Path]:
    """The folders from which a rank imports: Python's, those of its packages, and of the checkout nothing but them."""
    package = Path(__file__).resolve().parents[1]
    torch = importlib.util.find_spec("torch")
    of_torch = [Path(torch.origin).parents[1]] if torch and torch.origin else []  # wherever it was put
    sites = [Path(folder) for folder in sys.path if Path(folder).name in ("site-packages", "dist-packages")]
    folders = [Path(sys.base_prefix), Path(sys.prefix), *sites, *of_torch, package, package.parent / "labs"]
    every = [folder.resolve() for folder in folders if folder.is_dir()]
    return [folder for folder in dict.fromkeys(every) if not any(above in every for above in folder.parents)]


def _show_only(libc: ctypes.CDLL, paths: list[Path]) -> None:
    """In place of every folder that is not the system's put another: empty, but for what is below one of the paths."""
    tops = {entry.path for entry in os.scandir("/") if entry.is_dir(follow_symlinks=False)}
    for place in sorted(tops - SYSTEM | set(filter(os.path.isdir, TEMPORARY))):  # /var before /var/tmp
        kept = {path: os.open(path, os.O_PATH | os.O_DIRECTORY) for path in paths if path.is_relative_to(place)}
        if Path(place) not in kept:
            os.makedirs(place, exist_ok=True)
            _cover(libc, place, b"mode=1777," + TEMPORARY_SIZE if place in TEMPORARY else b"mode=755,size=1m", 0)
            for path, descriptor in kept.items():
                path.mkdir(parents=True, exist_ok=True)
                libc.mount(f"/proc/self/fd/{descriptor}".encode(), str(path).encode(), None, MS_BIND | MS_REC, None)
        for descriptor in kept.values():
            os.close(descriptor)


def _close_all_but(control: int) -> None:
    """Close what this process has inherited: the pipe of multiprocessing's resource tracker, which removes whatever it
    is told to, as root; the one that keeps the fork server alive; and whatever else there is."""
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]  # it starts its own when it needs one
    forkserver._forkserver._forkserver_alive_fd = None  # type: ignore[attr-defined]
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != control:
            with contextlib.suppress(OSError):
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
