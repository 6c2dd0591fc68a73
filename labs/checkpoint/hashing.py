"""A file's bytes on their way to the disk and back, with their SHA-256 computed beside it.

hashlib, read and write all let go of Python's interpreter lock, so one thread hashes a block while another moves it:
writing or reading and hashing take as long as the slower of the two.

[Note: around the page cache]  Writing goes straight to the disk (O_DIRECT) where the file system can: what a save
leaves in the page cache nobody reads, and a kernel that has too much of it to write holds the writer up (measured with
2 cores and 1 GiB: 400 to 1,200 MB/s through the cache, with hashing; 1,700 MB/s around it). O_DIRECT takes whole
sectors from aligned memory only, so bytes are copied to buffers first.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec

CHUNK_BYTES = 4 << 20
DEPTH = 4
"""Blocks that may be under way at once."""
FILES_AT_ONCE = 4
"""That a rank writes or checks."""
AHEAD_BYTES = 128 << 20
"""How far ahead of the reader the kernel is told to read: its own guess leaves a fast disk idle half of the time."""
SECTOR_BYTES = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a whole file is known by."""

    size_bytes: int
    sha256: str


def write_file(path: Path, parts: Iterable[memoryview | bytes]) -> FileInfo:
    """Write a new file, part after part, hash it meanwhile, and fsync it.

    Args:
        parts: bytes of any number; a part may change when the next one has been asked for.

    Raises:
        OSError: it is there already, or cannot be written.
    """
    digest, size_bytes = hashlib.sha256(), 0
    under_way: deque[tuple[Future[None], Future[None]]] = deque()
    file = _new_file(path)
    try:
        with ThreadPoolExecutor(1) as hasher, ThreadPoolExecutor(1) as writer:
            for block in _in_blocks(parts):
                size_bytes += len(block)
                under_way.append((hasher.submit(digest.update, block), writer.submit(_write, file, block)))
                if len(under_way) == DEPTH:  # the next block is filled where this one was
                    _results(under_way.popleft())
            while under_way:
                _results(under_way.popleft())
        os.fsync(file)
    finally:
        os.close(file)
    return FileInfo(size_bytes, digest.hexdigest())


def _in_blocks(parts: Iterable[memoryview | bytes]) -> Iterator[memoryview]:
    """All bytes in blocks of `CHUNK_BYTES`, of which the last may be shorter, in `DEPTH` buffers that take turns."""
    buffers = [memoryview(mmap.mmap(-1, CHUNK_BYTES)) for _ in range(DEPTH)]  # whole pages: aligned
    turn = filled = 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            n = min(len(rest), CHUNK_BYTES - filled)
            buffers[turn][filled : filled + n] = rest[:n]
            filled, rest = filled + n, rest[n:]
            if filled == CHUNK_BYTES:
                yield buffers[turn]
                turn, filled = (turn + 1) % DEPTH, 0
    if filled:
        yield buffers[turn][:filled]


def _new_file(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags | _DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        path.unlink(missing_ok=True)  # some kernels have made it before they refuse
        return os.open(path, flags, 0o666)


def _write(file: int, block: memoryview) -> None:
    """Write a block at the file's end; from what is no whole sector on, through the page cache."""
    while block:
        direct = _DIRECT & fcntl.fcntl(file, fcntl.F_GETFL)
        if direct and len(block) % SECTOR_BYTES:
            direct = _through_cache(file)
        try:
            block = block[os.write(file, block) :]  # one call may write less than all
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            _through_cache(file)  # larger sectors


def _through_cache(file: int) -> int:
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) & ~_DIRECT)
    return 0


def _results(futures: Iterable[Future[None]]) -> None:
    for future in wait(futures).done:
        future.result()


def hash_file(path: Path) -> FileInfo:
    """Size and SHA-256 of a file; it is in the page cache afterwards, if that is large enough.

    Raises:
        OSError: it cannot be read.
    """
    digest, size_bytes, advised = hashlib.sha256(), 0, 0
    buffers = [memoryview(bytearray(CHUNK_BYTES)) for _ in range(2)]
    hashing: Future[None] | None = None
    with open(path, "rb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        while True:
            if hasattr(os, "posix_fadvise") and size_bytes + AHEAD_BYTES // 2 >= advised:
                os.posix_fadvise(file.fileno(), advised, AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
                advised += AHEAD_BYTES
            buffer = buffers[0]
            n = file.readinto(buffer)
            if hashing:
                hashing.result()
            if not n:
                return FileInfo(size_bytes, digest.hexdigest())
            hashing = hasher.submit(digest.update, buffer[:n])
            size_bytes += n
            buffers.reverse()


def fsync_folder(path: Path) -> None:
    """Make durable which names are in a folder: without it a renamed or new file may be gone after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
