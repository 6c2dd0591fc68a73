"""The judge of "true or false, and which number settles it".

A number that is counted has to come from the experiment. So the experiment runs twice: as torch is, and once more
where torch's FSDP issues each collective a number of times that is drawn anew. What was counted grows with it, and so
does the account; what was known beforehand does not. A number that is measured is measured once more, on something
drawn anew.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from unittest.mock import patch

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.compare import difference, text
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.judges.account import dishonest
from fsdp_sim.learn.judges.answers import not_yet
from fsdp_sim.learn.verdict import Finding, Grade

MOST_TIMES = 4


@dataclass(frozen=True)
class Claim:
    """A statement, and an experiment of the learner's that settles it: ``(True or False, the number)`` on every rank.

    Attributes:
        statement: what is claimed.
        measured: what the number is: "all-gathers in one step".
        truth: the number, from the library; given what was drawn, the number for that.
        holds: whether the statement is true, given the number.
        ranks: how many run the experiment.
        counts: the collective of torch's FSDP that the number counts (``all_gather``), if it does: then the account
            must show as many, also where FSDP issues each several times.
        beside: how many other collectives the experiment issues: an answer without it would have to show these too.
        drawn: the arguments of a second call, drawn anew, for which another number is right.
        instead: what they are: "an AdamW of other moments".
        calls: a class and its method without which the experiment is another one.
        causes: usual wrong numbers, or what is true of them, and where each comes from.
    """

    statement: str
    measured: str
    truth: Callable[..., float]
    holds: Callable[[float], bool]
    ranks: int = 2
    counts: str = ""
    beside: tuple[tuple[str, int], ...] = ()
    drawn: Callable[[random.Random], tuple[Any, ...]] | None = None
    instead: str = ""
    calls: tuple[type, str] | None = None
    causes: tuple[tuple[float | Callable[[float], bool], str], ...] = ()
    rel: float = 1e-9

    def trial(self, seed: int) -> Trial:
        if self.drawn:
            return Trial((((), self.drawn(random.Random(seed))),) * self.ranks)
        if not self.counts:
            return Trial((((),),) * self.ranks)
        within = functools.partial(Calling, *self.calls) if self.calls else None
        return Trial((((), ()),) * self.ranks, within=within, issues=(1, random.Random(seed).randint(2, MOST_TIMES)))

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        right = self.truth()
        if untrue := dishonest(ran):
            return not_yet(untrue, "")
        for rank, answers in enumerate(ran.answers):
            message = self._wrong(rank, answers[0], right) or self._not_counted(rank, answers, trial, ran)
            message = message or self._not_measured(rank, answers, trial)
            if message:
                number = answers[0][1] if _is_pair(answers[0]) else None
                cause = next((cause for usual, cause in self.causes if _is(number, usual)), "")
                issued = len(ran.records[rank]) / sum(trial.issues or (1,))
                return not_yet(message, cause or self._counted_all(number, right, issued))
        return Finding(Grade.PASS, f'"{self.statement}" is {self.holds(right)}: {text(right)} {self.measured}.')

    def _counted_all(self, number: Any, right: float, issued: float) -> str:
        """The cause, where a number is that of all collectives and not of the kind that is asked for."""
        if not self.counts or number != issued or issued == right:
            return ""
        return f"that is how many collectives there were of any kind; count each {self.counts.replace('_', '-')}"

    def _wrong(self, rank: int, answer: Any, right: float) -> str:
        if not _is_pair(answer):
            return f"rank {rank}: expected True or False and the number of {self.measured}, found {text(answer)}"
        says, number = answer
        if difference(right, number, rel=self.rel) is not None:
            return f"rank {rank}: expected {text(right)} {self.measured}, found {text(number)}"
        if says != self.holds(right):
            return (
                f"rank {rank}: the number is right, {text(right)} {self.measured}, "
                f'but it makes "{self.statement}" {self.holds(right)}, not {says}'
            )
        return ""

    def _not_counted(self, rank: int, answers: list[Any], trial: Trial, ran: TrialRun) -> str:
        """Why a right number cannot come from the experiment, or nothing."""
        if not self.counts:
            return ""
        number, (once, times) = answers[0][1], trial.issues
        again = answers[1][1] if _is_pair(answers[1]) else answers[1]
        if difference(times * number, again, rel=self.rel) is not None:
            return (
                f"rank {rank}: the number is right, and it was not counted: run once more, where torch's FSDP issues "
                f"each collective {times} times, your code answers {text(again)}; measure it, with one step on these "
                "ranks"
            )
        for op, expected in ((self.counts, number), *self.beside):
            found = sum(record.op == op for record in ran.records[rank])
            if found != (once + times) * expected:
                return (
                    f"rank {rank}: the number is right, but the account of {once} and {times} such experiments shows "
                    f"{found} {op.replace('_', '-')}s, not {text((once + times) * expected)}: run the experiment that "
                    "is asked for, and nothing beside it"
                )
        return ""

    def _not_measured(self, rank: int, answers: list[Any], trial: Trial) -> str:
        """Why a right number was known beforehand, or nothing."""
        if not self.drawn:
            return ""
        right, again = self.truth(*trial.each[rank][1]), answers[1][1] if _is_pair(answers[1]) else answers[1]
        if difference(right, again, rel=self.rel) is None:
            return ""
        return (
            f"rank {rank}: the number is right, and not everything was measured: run once more with {self.instead}, "
            f"expected {text(right)}, found {text(again)}"
        )


@dataclass(frozen=True)
class Calling:
    """Calls a function, and refuses its answer if a method was not called meanwhile."""

    owner: type
    method: str
    function: Callable[..., Any]

    def __call__(self) -> Any:
        once = getattr(self.owner, self.method)
        with patch.object(self.owner, self.method, autospec=True, side_effect=once) as seen:
            answer = self.function()
        if not seen.called and answer is not ...:
            refuse(f"no {self.owner.__name__}.{self.method} was called, so this is another experiment")
        return answer


def refuse(why: str) -> NoReturn:
    """Ends a learner's call, of which the check then says why."""
    raise RuntimeError(why)


def _is(number: Any, usual: float | Callable[[float], bool]) -> bool:
    if not callable(usual):
        return bool(usual == number)
    return isinstance(number, int | float) and usual(number)


def _is_pair(answer: Any) -> bool:
    return isinstance(answer, list) and len(answer) == 2 and isinstance(answer[0], bool)
