"""What the learner has done so far: one small file on this machine, which nothing else reads.

It is written whole, to a file beside it that then takes its place, under a lock: two notebooks lose nothing of each
other. A damaged one is put aside and a new one begun.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from fsdp_sim.learn.verdict import Grade

VARIABLE = "FSDP_SIM_PROGRESS"
VERSION = 1
LOCK_S = 5.0


class State(StrEnum):
    """Where an exercise stands. ``SEEN``: its solution was looked at before it was solved."""

    OPEN = "open"
    TRIED = "tried"
    PASSED = "passed"
    OPTIMAL = "optimal"
    SEEN = "seen"


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of one exercise.

    Attributes:
        grade: the best so far, a `Grade`.
        hints: how many were asked for.
        seen: the solution was looked at before it was solved.
    """

    tries: int = 0
    grade: int = 0
    hints: int = 0
    seen: bool = False

    @property
    def state(self) -> State:
        if self.seen:
            return State.SEEN
        if self.grade:
            return State.OPTIMAL if self.grade >= Grade.OPTIMAL else State.PASSED
        return State.TRIED if self.tries else State.OPEN


class _File(msgspec.Struct):
    exercises: dict[str, Entry] = {}
    version: int = VERSION


def path() -> Path:
    """Where the file is: what the environment variable ``FSDP_SIM_PROGRESS`` says, else the user's folder for data."""
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    import platformdirs

    return Path(platformdirs.user_data_dir("fsdp_sim", appauthor=False)) / "progress.json"


def read() -> dict[str, Entry]:
    """All entries; empty if there is no file or it is damaged."""
    try:
        return _read(path())
    except (OSError, ValueError):
        return {}


def entry(name: str) -> Entry:
    """What is kept of one exercise."""
    return read().get(name, Entry())


def change(name: str, how: Callable[[Entry], Entry | None]) -> str:
    """Change the entry of an exercise, or remove it where ``how`` answers None.

    Returns:
        what went wrong, as a sentence; empty if nothing did. A full disk is no reason to lose a verdict.
    """
    from filelock import FileLock, Timeout

    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock", timeout=LOCK_S):
            aside = ""
            try:
                entries = _read(file)
            except ValueError:
                kept = file.with_name(f"{file.name}.damaged")
                os.replace(file, kept)
                entries, aside = (
                    {},
                    f"The record of your progress was damaged; it is now {kept}, and a new one begun.",
                )
            new = how(entries.get(name, Entry()))
            entries = {key: value for key, value in entries.items() if key != name} | ({name: new} if new else {})
            _write(file, entries)
            return aside
    except (OSError, Timeout) as error:
        return f"Your progress could not be written to {file} ({error}); set {VARIABLE} to a file that can be."


def _read(file: Path) -> dict[str, Entry]:
    """Raises ValueError where it is no such file."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return {}
    return msgspec.json.decode(data, type=_File).exercises


def _write(file: Path, entries: dict[str, Entry]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(msgspec.json.format(msgspec.json.encode(_File(dict(sorted(entries.items())))), indent=1))
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
