"""The judge of "true or false, and which number settles it"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.compare import difference, text
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.judges.account import dishonest
from fsdp_sim.learn.judges.answers import not_yet
from fsdp_sim.learn.verdict import Finding, Grade


@dataclass(frozen=True)
class Claim:
    """A statement, and an experiment of the learner's that settles it: ``(True or False, the number)`` on every rank.

    Attributes:
        statement: what is claimed.
        measured: what the number is: "all-gathers in one step".
        truth: the number, from the library.
        holds: whether the statement is true, given the number.
        ranks: how many run the experiment.
        counts: the collective that the number counts (``all_gather``), if it does: then the account must show as many,
            so that an answer without an experiment is found.
        beside: how many other collectives the experiment issues: an answer without it would have to show these too.
        causes: usual wrong numbers, and where each comes from.
    """

    statement: str
    measured: str
    truth: Callable[[], float]
    holds: Callable[[float], bool]
    ranks: int = 2
    counts: str = ""
    beside: tuple[tuple[str, int], ...] = ()
    causes: tuple[tuple[float, str], ...] = ()
    rel: float = 1e-9

    def trial(self, seed: int) -> Trial:
        return Trial((((),),) * self.ranks)

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        right = self.truth()
        if untrue := dishonest(ran):
            return not_yet(untrue, "")
        answers = [of_rank[0] for of_rank in ran.answers]
        for rank, answer in enumerate(answers):
            message = self._wrong(rank, answer, right, ran)
            if message:
                number = answer[1] if _is_pair(answer) else None
                cause = next((cause for usual, cause in self.causes if usual == number), "")
                return not_yet(message, cause or self._counted_all(number, right, len(ran.records[rank])))
        return Finding(Grade.PASS, f'"{self.statement}" is {self.holds(right)}: {text(right)} {self.measured}.')

    def _counted_all(self, number: Any, right: float, issued: int) -> str:
        """The cause, where a number is that of all collectives and not of the kind that is asked for."""
        if not self.counts or number != issued or issued == right:
            return ""
        return f"that is how many collectives there were of any kind; count each {self.counts.replace('_', '-')}"

    def _wrong(self, rank: int, answer: Any, right: float, ran: TrialRun) -> str:
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
        issued = sum(record.op == self.counts for record in ran.records[rank])
        if self.counts and issued != number:
            return (
                f"rank {rank} answers {text(number)} {self.measured}, and its account shows {issued}: "
                "measure it, with one step on these ranks"
            )
        for op, expected in self.beside:
            found = sum(record.op == op for record in ran.records[rank])
            if found != expected:
                return (
                    f"rank {rank}: the number is right, but its account shows {found} {op.replace('_', '-')}s, and the "
                    f"experiment that is asked for issues {expected}: run that, and nothing beside it"
                )
        return ""


def _is_pair(answer: Any) -> bool:
    return isinstance(answer, list) and len(answer) == 2 and isinstance(answer[0], bool)
