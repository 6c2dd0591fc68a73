"""``check(name, solution)``: run a learner's function in a process of its own and say what is wrong with it."""

from __future__ import annotations

import difflib
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from fsdp_sim.learn import start_here
from fsdp_sim.ranks import RanksError, run

MEMORY_LIMIT_BYTES = 4 * 1024**3

Judge = Callable[[Sequence[Any]], str]
"""Takes what the solution returned for each case; returns what is wrong with it, or nothing."""

EXERCISES: dict[str, tuple[Sequence[tuple[Any, ...]], Judge]] = {
    "all_gathers_per_step": (start_here.CASES, start_here.judge_all_gathers),
}


@dataclass(frozen=True)
class Verdict:
    """The answer to a solution. Shown in a notebook with a coloured edge, in a terminal as text."""

    passed: bool
    message: str

    def __str__(self) -> str:
        return f"{'Right' if self.passed else 'Not yet'}: {self.message}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour = "#009E73" if self.passed else "#D55E00"
        return f'<div style="border-left:5px solid {colour};padding:.4em .8em">{escape(str(self))}</div>'


def check(name: str, solution: Callable[..., Any], *, time_limit_s: int = 20) -> Verdict:
    """Check a solution of an exercise.

    The solution runs in a process of its own, with limits on time and memory, so a mistake in it does not hurt the
    notebook.

    Raises:
        ValueError: there is no such exercise; the message names the nearest.
        TypeError: the solution is not a function.
    """
    if name not in EXERCISES:
        near = difflib.get_close_matches(name, EXERCISES, n=1) or sorted(EXERCISES)
        raise ValueError(f"there is no exercise {name!r}; did you mean {near[0]!r}?")
    if not callable(solution):
        raise TypeError(f"check({name!r}, {solution!r}): the second argument is your function, without calling it")
    cases, judge = EXERCISES[name]
    try:
        answers = run(_answers, 1, solution, cases, time_limit_s, progress=False, show_output=False, record=False)[0]
    except RanksError as error:
        if "SIGALRM" in str(error):
            return Verdict(False, f"it was still running after {time_limit_s} s; is there a loop that does not end?")
        return Verdict(False, str(error).splitlines()[0].removeprefix("rank 0 "))
    wrong = judge(answers)
    return Verdict(not wrong, wrong or "it agrees with the program that torch issues, for every case tried.")


def _answers(solution: Callable[..., Any], cases: Sequence[tuple[Any, ...]], time_limit_s: int) -> list[Any]:
    signal.alarm(time_limit_s)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    return [solution(*case) for case in cases]
