"""The process that judges: reads `JudgeTask` from its standard input, writes a line of JSON for each exercise.

It is started anew when it dies or stands still, which no code should be able to bring about.
"""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import fsdp_sim

READY = b"ready"  # before the number of the user that is lent
CHECKERS = tuple(f"fsdp_sim/learn/{room}" for room in ("exercises", "judges", "drill"))
CHECKERS += ("notebooks", "tests", "build", ".git")
"""What no code that is graded may read: solutions and judges, and where copies of them are."""
SOLUTIONS = "/fsdp_sim/learn/exercises"  # below a checkout
KERNELS = ("/proc", "/sys", "/dev")  # which hold no files of people
MEMORY_BYTES = 6 * 2**30  # of this process


class JudgeTask(msgspec.Struct, frozen=True):
    """What is to be judged.

    Attributes:
        answers: by exercise, its code.
        hidden: folders that the code must not be able to read, beside the checker's own.
        as_other_user: whether it runs as a user lent for it, and not as this process's.
    """

    answers: dict[str, str]
    hidden: tuple[str, ...]
    as_other_user: bool


class ExerciseVerdict(msgspec.Struct, frozen=True):
    """The verdict on one exercise: its grade as a number, and what `check` would say, with what the code printed."""

    exercise: str
    grade: int
    feedback: str


def main() -> None:
    import cloudpickle

    from fsdp_sim.learn import exercises, judges
    from fsdp_sim.learn.check import judge
    from fsdp_sim.learn.classroom.grading.written_function import Written
    from fsdp_sim.learn.find import load
    from fsdp_sim.ranks import Limits, OtherUser, RanksError, run, start_server

    start_server()  # before there is a limit on memory
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=JudgeTask)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    for package in (exercises, judges):
        cloudpickle.register_pickle_by_value(package)  # sent as it is: the ranks cannot read its files
    checkout = Path(fsdp_sim.__file__).parents[1]
    own = [path for path in (checkout / name for name in CHECKERS) if path.is_dir()]
    user = OtherUser.unused(*own, *work.hidden) if work.as_other_user else None
    limits = Limits(user=user)

    def as_user(function: Callable[..., Any], *args: Any) -> Any:
        try:
            return run(function, 1, *args, limits=limits, plain=True, progress=False)[0]
        except RanksError as error:
            raise SystemExit(f"nothing can be run as another user here: {error.verdict.headline}") from None

    found, unlisted = as_user(look_around) if user else ([], [])
    if files := solutions_below(unlisted):  # this process, which is root's, can list them
        found = sorted({*found, *map(checkout_of, as_user(readable, files))})
    if found:
        raise SystemExit(
            f"the code that is graded could read the solutions in {' and in '.join(found)}; add --hide {found[0]}, or "
            f"take it from other users: chmod -R go= {found[0]}"
        )
    sys.stdout.buffer.write(b"%s %d\n" % (READY, user.uid if user else 0))
    for name, source in work.answers.items():
        sys.stdout.buffer.flush()
        verdict = judge(load(name), Written(name, source), limits)
        judged = ExerciseVerdict(name, int(verdict.grade), str(verdict))
        sys.stdout.buffer.write(msgspec.json.encode(judged) + b"\n")
    sys.stdout.buffer.flush()


def look_around() -> tuple[list[str], list[str]]:
    """Runs as the other user, who can run the library at all: the checkouts whose solutions it can list, whichever they
    are and whosever; and the folders that it can pass through without listing them."""
    import fsdp_sim.learn.inside  # noqa: F401

    found, unlisted, folders = [], [], ["/"]
    for folder in folders:
        try:
            below = [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
        except OSError:
            if os.access(folder, os.X_OK):
                unlisted.append(folder)
            continue
        if folder.endswith(SOLUTIONS):
            found.append(checkout_of(folder))
        elif folder.endswith(("/site-packages", "/dist-packages")):  # thousands of others' folders
            folders += [entry.path for entry in below if entry.name == "fsdp_sim"]
        else:
            folders += [os.path.join(folder, entry.name) for entry in below if entry.path not in KERNELS]
    return found, unlisted


def solutions_below(folders: list[str]) -> list[str]:
    """The files of solutions below some folders."""
    walked = (place for folder in folders for place in os.walk(folder))
    return [os.path.join(place, name) for place, _, files in walked if SOLUTIONS in place for name in files]


def readable(files: list[str]) -> list[str]:
    """Runs as the other user: those of the files that it can read."""
    return [path for path in files if os.access(path, os.R_OK)]


def checkout_of(path: str) -> str:
    return path.partition(SOLUTIONS)[0]


if __name__ == "__main__":
    main()
