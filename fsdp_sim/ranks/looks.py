"""How much memory a rank takes, by the kernel's count, read by the parent: the code that runs in the rank cannot change
it.

The kernel knows the size of a process, and the most that it ever was. Where each tensor of some size is a mapping of
its own, what it says follows the tensors to a page.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import mmap
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from fsdp_sim.ranks.limits import status_bytes

if TYPE_CHECKING:
    from fsdp_sim.ranks.board import BoardView

MMAP_BYTES = 2**16  # larger pieces of memory are to be mappings of their own
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_ARENA_MAX = -3, -1, -8  # of glibc's malloc.h
TRIED_BYTES, TRIES = 2**20, 4
PIECES_BYTES, MOST_PIECES = [2**power for power in range(24, 16, -1)], 64
LOOK_S = 0.001
OBJECT_BYTES, ROOM_BYTES, KEPT_EVERY_BYTES = 400, 3 * 2**20, 2**17  # below 512, which CPython's own allocator serves

T = TypeVar("T")


class Look(NamedTuple):
    """At one moment: the size of a process, and the most that it ever was."""

    size_bytes: int
    most_bytes: int


def look(pid: int | str) -> Look | None:
    """None where the kernel does not say."""
    sizes = status_bytes(pid)
    return Look(sizes["VmSize"], sizes["VmPeak"]) if {"VmSize", "VmPeak"} <= sizes.keys() else None


# ---- In a rank


@contextlib.contextmanager
def looked_at() -> Iterator[None]:
    """Have the parent look at this rank before and after, where the kernel's count follows what is allocated. It does
    not where another malloc than glibc's is preloaded, and on macOS."""
    libc = _mapping()
    if libc is None:
        yield
        return
    room = _room()
    filled = _filled(libc)
    if not any(TRIED_BYTES <= _grows(libc, TRIED_BYTES)[1] <= TRIED_BYTES + MMAP_BYTES for _ in range(TRIES)):
        yield
        return
    before, gap = look("self"), None
    if before and before.most_bytes > before.size_bytes:  # as large as it ever was: what comes on top shows
        gap = mmap.mmap(-1, before.most_bytes - before.size_bytes)
    _ask()
    yield
    _ask()
    del gap, room
    for piece in filled:
        libc.free(ctypes.c_void_p(piece))


def again(given: T) -> T:
    """What a rank was given, allocated once more, each large piece as a mapping of its own: of what malloc had put
    elsewhere the kernel would not see it go."""
    if libc := _mapping():
        _filled(libc)  # until the rank ends
        return copy.deepcopy(given)
    return given


def _mapping() -> ctypes.CDLL | None:
    """The C library, whose malloc makes each large piece a mapping of its own from now on; None where it cannot."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return None
    libc.malloc.restype = ctypes.c_void_p
    for name, value in ((M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, MMAP_BYTES), (M_ARENA_MAX, 1)):
        libc.mallopt(name, value)
    return libc


def _room() -> list[bytes]:
    """Give Python room for its objects, which it takes from the kernel by the MiB: how full the last MiB is when the
    code begins is chance, and the next would count as the code's. What is returned keeps them from being given back."""
    taken = [bytes(OBJECT_BYTES) for _ in range(ROOM_BYTES // OBJECT_BYTES)]
    return taken[:: KEPT_EVERY_BYTES // OBJECT_BYTES]


def _filled(libc: ctypes.CDLL) -> list[int]:
    """Take what malloc has free, so that what is allocated from now on comes from the kernel: where each piece is."""
    found = []
    for size in PIECES_BYTES:
        for _ in range(MOST_PIECES):
            piece, grown = _grows(libc, size, keep=True)
            if grown:
                libc.free(ctypes.c_void_p(piece))
                break
            found.append(piece)
    return found


def _grows(libc: ctypes.CDLL, size: int, keep: bool = False) -> tuple[int, int]:
    """Allocate a piece: where it is, and by how much the process has grown."""
    before, piece, after = look("self"), libc.malloc(ctypes.c_size_t(size)), look("self")
    if not keep:
        libc.free(ctypes.c_void_p(piece))
    return piece, after.size_bytes - before.size_bytes if before and after else 0


def _ask() -> None:
    from fsdp_sim.ranks.work import Context  # it imports torch

    status, rank = Context.board.status, Context.rank
    status["asked"][rank] += 1
    while status["looked"][rank] < status["asked"][rank]:
        time.sleep(LOOK_S)


# ---- In the parent


class Looks:
    """What was seen of each rank, each time that it asked."""

    def __init__(self, board: BoardView, pids: list[int]) -> None:
        self._board, self._pids = board, pids
        self.seen: list[list[Look | None]] = [[] for _ in pids]

    def update(self) -> None:
        """Look at the ranks that ask."""
        for rank, (pid, seen) in enumerate(zip(self._pids, self.seen, strict=True)):
            if len(seen) < int(self._board.status["asked"][rank]):
                seen.append(look(pid))
                self._board.answer(rank, len(seen))
