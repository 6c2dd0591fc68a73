"""``grade(answers)``: points for each exercise, and the words that go with them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

import fsdp_sim
from fsdp_sim.learn.classroom.grading.worker import READY, Judged, Work
from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.find import load
from fsdp_sim.learn.verdict import WORDS, Grade

CHECKERS = tuple(f"fsdp_sim/learn/{room}" for room in ("exercises", "judges", "drill"))
CHECKERS += ("notebooks", "tests", "build", ".git")
"""What no code that is graded may read: solutions and judges, and where copies of them are."""
NOT_GRADED = frozenset(
    {
        "code_in_a_checkpoint",
        "count_what_was_saved",
        "keep_the_last_checkpoint",
        "load_onto_other_shards",
        "resume_where_it_stopped",
    }
)
"""Exercises about files that the judge and the code both use: another user has none in common with it."""
DIED = f"{WORDS[Grade.NOT_YET]}: the code brought down the process that checks it. That is no way to pass."


class Graded(msgspec.Struct, frozen=True):
    """An exercise of a submission: points out of so many, and what was said."""

    exercise: str
    points: int
    out_of: int
    said: str


def points(exercise: Exercise) -> int:
    """What an exercise is worth: its difficulty, 1 to 5."""
    return exercise.difficulty


def grade(answers: Mapping[str, str], hide: Iterable[Path] = (), *, as_other_user: bool = True) -> Iterator[Graded]:
    """Grade the code of some exercises, one after the other; those that are `NOT_GRADED` are passed over.

    Args:
        answers: by exercise, the code of its cell.
        hide: folders that the code must not be able to read, beside the checker's own files.
        as_other_user: run it as a user lent for this call; only root can. Else as who calls: for code one trusts.

    Raises:
        PermissionError: this process may not become another user.
        ValueError: the other user could read what it must not, or cannot run the library; nothing has been graded.
    """
    if as_other_user and os.geteuid() != 0:
        raise PermissionError("grading runs code as another user, which only root can: put sudo before the command")
    root = Path(fsdp_sim.__file__).parents[1]
    hidden = [path for path in (*(root / name for name in CHECKERS), *hide) if path.is_dir()]
    left = {name: code for name, code in answers.items() if not (as_other_user and name in NOT_GRADED)}
    while left:
        for judged in _judged(Work(left, tuple(map(str, hidden)), as_other_user)):
            del left[judged.exercise]
            yield _graded(judged)
        if left:  # it died at the first of them
            name = next(iter(left))
            del left[name]
            yield _graded(Judged(name, Grade.NOT_YET, DIED))


def _judged(work: Work) -> Iterator[Judged]:
    """What a worker says of each exercise, until it has come to the end or died.

    Raises:
        ValueError: it did not begin.
    """
    # -I: neither the folder one stands in nor the user's own packages are looked into.
    command = [sys.executable, "-I", "-m", "fsdp_sim.learn.classroom.grading.worker"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    with (
        tempfile.TemporaryFile() as errors,  # a pipe that nobody reads could fill up
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=kept) as worker,
    ):
        assert worker.stdin is not None  # they are pipes
        assert worker.stdout is not None
        worker.stdin.write(msgspec.json.encode(work))
        worker.stdin.close()
        if worker.stdout.readline() != READY:
            worker.wait()
            errors.seek(0)
            last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
            raise ValueError(f"grading cannot begin: {(last or ['the checker ended without a word'])[0]}")
        try:
            for line in worker.stdout:
                yield msgspec.json.decode(line, type=Judged)
        finally:
            worker.kill()


def _graded(judged: Judged) -> Graded:
    out_of = points(load(judged.exercise))
    return Graded(judged.exercise, out_of if judged.grade > Grade.NOT_YET else 0, out_of, judged.said)
