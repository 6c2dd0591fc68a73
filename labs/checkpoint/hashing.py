"""A file's bytes on their way to the disk and back, with their SHA-256 computed beside it.

hashlib, read and write all let go of Python's interpreter lock, so one thread hashes a chunk while another moves the
next one: writing or reading and hashing take as long as the slower of the two.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

CHUNK_BYTES = 4 << 20
DEPTH = 4
"""Chunks that may be under way at once: whoever reuses buffers for `write_file` needs as many."""
AHEAD_BYTES = 128 << 20
"""How far ahead of the reader the kernel is told to read: its own guess leaves a fast disk idle half of the time."""


class FileInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a whole file is known by."""

    size_bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[memoryview | bytes]) -> FileInfo:
    """Write a new file, chunk after chunk, hash it meanwhile, and fsync it.

    Args:
        chunks: a chunk must not change before ``DEPTH - 1`` more have been asked for.

    Raises:
        OSError: it is there already, or cannot be written.
    """
    digest, size_bytes = hashlib.sha256(), 0
    hashing: deque[Future[None]] = deque()
    with open(path, "xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for chunk in chunks:
            hashing.append(hasher.submit(digest.update, chunk))
            rest = memoryview(chunk)
            size_bytes += len(rest)
            while rest:  # one call may write less than all
                rest = rest[file.write(rest) :]
            if len(hashing) == DEPTH:
                hashing.popleft().result()
        os.fsync(file.fileno())
        for update in hashing:
            update.result()
    return FileInfo(size_bytes, digest.hexdigest())


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
