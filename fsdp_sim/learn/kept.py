"""Small files of what the learner has done, on this machine, which nothing else reads.

They are written whole, to a file beside that then takes the place, under a lock: two notebooks lose nothing of each
other. A damaged one is put aside and a new one begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from fsdp_sim import timeline

VARIABLE = "FSDP_SIM_PROGRESS"
LOCK_S = 5.0
MAX_BYTES = 30_000_000
"""Of a file: that of a whole course has a thousandth."""

T = TypeVar("T", bound=msgspec.Struct)


def path() -> Path:
    """Where progress is kept: where the variable ``FSDP_SIM_PROGRESS`` says, else in the user's folder for data."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("fsdp_sim", appauthor=False)) / "progress.json"


def read(file: Path, of: type[T]) -> T:
    """What a file holds; empty if there is none or it is damaged."""
    try:
        return _read(file, of)
    except (OSError, ValueError):
        return of()


def change(file: Path, of: type[T], how: Callable[[T], T]) -> str:
    """Change what a file holds.

    Returns:
        what went wrong, as a sentence; empty if nothing did. A full disk is no reason to lose a verdict.
    """
    from filelock import FileLock, Timeout

    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=LOCK_S):
            aside = ""
            try:
                held = _read(file, of)
            except ValueError:
                put = file.with_name(f"{file.name}.damaged")
                os.replace(file, put)
                held, aside = of(), f"The record of your progress was damaged; it is now {put}, and a new one begun."
            _write(file, how(held))
            return aside
    except (OSError, Timeout) as error:
        return f"Your progress could not be written to {file} ({error}); set {VARIABLE} to a file that can be."


def read_text(file: Path, most_bytes: int) -> str:
    """The text of a file that anybody may have put there.

    Raises:
        OSError: it is not there, or no file. ValueError: it is no text, or larger than ``most_bytes``.
    """
    if file.exists() and not file.is_file():
        raise OSError(f"{file} is no file")  # to read a pipe or a device might never end
    return timeline.read_text(file, most_bytes)


def _read(file: Path, of: type[T]) -> T:
    """Raises ValueError where it is no such file."""
    if not file.exists():
        return of()
    try:
        return msgspec.json.decode(read_text(file, MAX_BYTES), type=of)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _write(file: Path, held: msgspec.Struct) -> None:
    with timeline.written(file) as new, open(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as out:
        out.write(msgspec.json.format(msgspec.json.encode(held), indent=1))
        out.flush()
        os.fsync(out.fileno())
