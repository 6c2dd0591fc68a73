"""``grade(answers)``: points for each exercise, and the words that go with them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

import fsdp_sim
from fsdp_sim.learn.classroom.grading.worker import READY, ExerciseVerdict, JudgeTask
from fsdp_sim.learn.exercise import Exercise
from fsdp_sim.learn.find import load
from fsdp_sim.learn.verdict import WORDS, Grade
from fsdp_sim.words import harmless

DIED = f"{WORDS[Grade.NOT_YET]}: the code brought down the process that checks it. That is no way to pass."
HELD_UP = f"{WORDS[Grade.NOT_YET]}: the code held up the process that checks it. That is no way to pass."
READY_S = 600.0  # until a worker has imported torch and started ranks, on a slow disk
LOOK_S = 0.1
EXERCISE_S = 240.0  # for one exercise, whose ranks are ended after 60 s


class ExerciseGrade(msgspec.Struct, frozen=True):
    """An exercise of a submission: points out of so many, and what was said."""

    exercise: str
    points: int
    out_of: int
    feedback: str


def points(exercise: Exercise) -> int:
    """What an exercise is worth: its difficulty, 1 to 5."""
    return exercise.difficulty


def grade(
    answers: Mapping[str, str], hide: Iterable[Path] = (), *, as_other_user: bool = True
) -> Iterator[ExerciseGrade]:
    """Grade the code of some exercises, one after the other.

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
    hidden = tuple(str(path.resolve()) for path in hide)
    left = dict(answers)
    while left:
        why = DIED
        try:
            for judged in _judged(JudgeTask(left, hidden, as_other_user)):
                del left[judged.exercise]
                yield _graded(judged)
        except TimeoutError:
            why = HELD_UP
        if left:  # it died at the first of them, or stood still there
            name = next(iter(left))
            del left[name]
            yield _graded(ExerciseVerdict(name, Grade.NOT_YET, why))


def _judged(work: JudgeTask) -> Iterator[ExerciseVerdict]:
    """What a worker says of each exercise, until it has come to the end or died. Nothing of it or of the code that it
    ran is left.

    Raises:
        ValueError: it did not begin. TimeoutError: it stands still.
    """
    # No user's own packages, not the folder one stands in, and this very checkout: another one may be installed.
    command = [sys.executable, "-P", "-s", "-m", "fsdp_sim.learn.classroom.grading.worker"]
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with (
        tempfile.TemporaryFile() as errors,  # a pipe that nobody reads could fill up
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryDirectory(prefix="fsdp_sim-", ignore_cleanup_errors=True) as folder,
    ):
        os.chmod(folder, 0o711)
        given.write(msgspec.json.encode(work))
        given.seek(0)
        kept |= {"TMPDIR": folder, "PYTHONPATH": str(Path(fsdp_sim.__file__).parents[1])}
        worker = subprocess.Popen(
            command, stdin=given, stdout=subprocess.PIPE, stderr=errors, env=kept, start_new_session=True
        )
        uid = 0
        try:
            lines = _Lines(worker)
            ready, _, number = lines.next(READY_S).partition(b" ")
            if ready != READY:
                worker.wait(READY_S)
                errors.seek(0)
                last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise ValueError(f"grading cannot begin: {(last or ['the checker ended without a word'])[0]}")
            uid = int(number)
            while line := lines.next(EXERCISE_S):
                yield msgspec.json.decode(line, type=ExerciseVerdict)
        finally:
            _end(worker, uid)


def _end(worker: subprocess.Popen[bytes], uid: int) -> None:
    """Kill a worker, its fork server and, where it did not come to its end, whatever the user that it lent has left."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(1.0 if worker.poll() is None else None)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    assert worker.stdout is not None  # it is a pipe
    worker.stdout.close()
    if uid and worker.returncode:
        from fsdp_sim.ranks import OtherUser

        OtherUser(uid).end()


class _Lines:
    """What a worker writes, line by line. Whoever else holds the pipe's other end cannot make this wait for ever."""

    def __init__(self, worker: subprocess.Popen[bytes]) -> None:
        assert worker.stdout is not None  # it is a pipe
        self._worker, self._descriptor, self._read = worker, worker.stdout.fileno(), b""

    def next(self, within_s: float) -> bytes:
        """The next line; empty when the worker has ended.

        Raises:
            TimeoutError: it writes nothing.
        """
        until_s = time.monotonic() + within_s
        while b"\n" not in self._read:
            ended = self._worker.poll() is not None  # asked first: what it wrote before is in the pipe
            if select.select([self._descriptor], [], [], 0.0 if ended else LOOK_S)[0]:
                chunk = os.read(self._descriptor, 1 << 16)
                self._read += chunk
                if not chunk:
                    return b""
            elif ended:
                return b""
            elif time.monotonic() > until_s:
                raise TimeoutError
        line, _, self._read = self._read.partition(b"\n")
        return line


def _graded(judged: ExerciseVerdict) -> ExerciseGrade:
    out_of = points(load(judged.exercise))
    return ExerciseGrade(
        judged.exercise, out_of if judged.grade > Grade.NOT_YET else 0, out_of, harmless(judged.feedback)
    )
