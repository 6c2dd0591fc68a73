"""How much of a file is read: ten megabytes that a stranger sends may unpack to more than any machine holds."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

Progress = Callable[[int, int], None]
"""Called by a reader now and then: bytes read, and bytes in all."""
MAX_BYTES = 2 * 10**9
"""Read of one file by default, unpacked. In memory that is up to 4 GB."""
EVENT_BYTES = 256
"""What an event of a timeline counts for at least: so much of memory it takes, however short it was written."""
LINE_BYTES = 64 << 20
"""A line that is longer is none of a timeline."""
GZIP_MAGIC = b"\x1f\x8b"


TEXT_BYTES = 10**7
"""Of a configuration: those of people have a thousandth."""


class TooLargeError(ValueError):
    """A file holds more than is read."""


def read_bytes(path: str | Path, most_bytes: int = TEXT_BYTES) -> bytes:
    """What is in a file that anybody may have written. It may be a device without an end, or a pipe; one into which
    nobody writes is empty.

    Raises:
        OSError: it cannot be opened. ValueError: it is longer than is read.
    """
    with open(path, "rb", opener=_at_once) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise TooLargeError(f"{path} is larger than the {most_bytes / 1e6:g} MB that are read of such a file")
    return data


def read_text(path: str | Path, most_bytes: int = TEXT_BYTES) -> str:
    """`read_bytes` of a text in UTF-8, of which `UnicodeDecodeError` says where it is none."""
    return "\n".join(read_bytes(path, most_bytes).decode().split("\r\n"))


def _at_once(path: str, flags: int) -> int:
    """Opens a file; of a pipe not only once somebody writes into it."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    os.set_blocking(descriptor, True)
    return descriptor


def unzipped(path: Path) -> BinaryIO:
    """A file open for reading, whether it is plain or gzipped.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open("rb") as file:
        zipped = file.read(2) == GZIP_MAGIC
    return cast(BinaryIO, gzip.open(path, "rb")) if zipped else path.open("rb")


def refuse_beyond(path: Path, n_bytes: int, max_bytes: int) -> None:
    """Raise `TooLargeError` if more was read of a file than is allowed."""
    if n_bytes > max_bytes:
        raise TooLargeError(
            f"{path} holds more than the {max_bytes / 1e9:g} GB (unpacked) that are read of a file, and reading takes "
            "up to twice that of memory; if you know where it comes from, raise the limit: "
            "read_timeline(..., max_bytes=...), or fsdp-sim diagnose --max-gb"
        )
