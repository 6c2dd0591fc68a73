"""The process that judges: reads `Work` from its standard input, writes a line of JSON for each exercise.

It is started anew when it dies: the board on which ranks report is memory that the code could cut short.
"""

from __future__ import annotations

import sys

import msgspec

READY = b"ready\n"


class Work(msgspec.Struct, frozen=True):
    """What is to be judged.

    Attributes:
        answers: by exercise, its code.
        hidden: folders that the code must not be able to read.
        as_other_user: whether it runs as a user lent for it, and not as this process's.
    """

    answers: dict[str, str]
    hidden: tuple[str, ...]
    as_other_user: bool


class Judged(msgspec.Struct, frozen=True):
    """The verdict on one exercise: its grade as a number, and what `check` would say, with what the code printed."""

    exercise: str
    grade: int
    said: str


def main() -> None:
    import cloudpickle

    from fsdp_sim.learn import exercises, judges
    from fsdp_sim.learn.check import judge
    from fsdp_sim.learn.classroom.grading.written import Written
    from fsdp_sim.learn.find import load
    from fsdp_sim.ranks import Limits, OtherUser, RanksError, run

    work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    for package in (exercises, judges):
        cloudpickle.register_pickle_by_value(package)  # sent as it is: the ranks cannot read its files
    limits = Limits(user=OtherUser.lent(*work.hidden) if work.as_other_user else None)
    try:
        run(is_here, 2, limits=limits, plain=True, progress=False)
    except RanksError as error:
        raise SystemExit(f"nothing can be run as another user here: {error.verdict.headline}") from None
    sys.stdout.buffer.write(READY)
    for name, source in work.answers.items():
        sys.stdout.buffer.flush()
        verdict = judge(load(name), Written(name, source), limits)
        judged = Judged(name, int(verdict.grade), str(verdict))
        sys.stdout.buffer.write(msgspec.json.encode(judged) + b"\n")
    sys.stdout.buffer.flush()


def is_here() -> None:
    """The other user can run the library at all."""
    import fsdp_sim.learn.inside  # noqa: F401


if __name__ == "__main__":
    main()
