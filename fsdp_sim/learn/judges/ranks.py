"""The judge of code on real ranks: results against one process, then what the ranks' accounts show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.compare import difference
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.judges.account import Check, dishonest
from fsdp_sim.learn.judges.answers import not_yet
from fsdp_sim.learn.verdict import Finding, Grade

if TYPE_CHECKING:
    from fsdp_sim.ranks import Network

Inputs = Sequence[tuple[Any, ...]]
"""By rank, the arguments of its call."""
SHOWN = 2  # of the ways in which ranks are wrong


@dataclass(frozen=True)
class OnRanks:
    """Code that runs on every rank, each with inputs that no other rank sees, drawn anew for every check.

    A result that depends on other ranks' inputs can only come from communication, so a hard-coded one is wrong.

    Attributes:
        inputs: draws the arguments of each rank's call from a seed. Tensors of at least 50,000 numbers, so that what
            the kernel counts shows.
        truth: what each rank should return, computed in one process from the inputs of all.
        again: draws the arguments of a second call, for what the first cannot show.
        causes: what each rank would return after a usual mistake, and the sentence that names it.
        checks: of the account: `OnlyCollectives`, `CollectiveOrder`, `BytesSent`, `PeakBytes`, `ExposedTime`.
        network: a slow one.
        rel, abs_: how far numbers may be off.
    """

    inputs: Callable[[int], Inputs]
    truth: Callable[[Inputs], Sequence[Any]]
    again: Callable[[int], Inputs] | None = None
    causes: tuple[tuple[Callable[[Inputs], Sequence[Any]], str], ...] = ()
    checks: tuple[Check, ...] = ()
    network: Network | None = None
    metered: bool = False
    rel: float = 1e-5
    abs_: float = 1e-5

    def trial(self, seed: int) -> Trial:
        calls = [self.inputs(seed), *([self.again(seed)] if self.again else [])]
        each = tuple(tuple(tuple(map(_own, call)) for call in of_rank) for of_rank in zip(*calls, strict=True))
        return Trial(each, self.network, self.metered)

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        if ran.replaced:
            return Finding(Grade.NOT_YET, f"{dishonest(ran)}.")
        for inputs, answers in zip(zip(*trial.each, strict=True), zip(*ran.answers, strict=True), strict=True):
            if wrong_results := self._results(inputs, list(answers)):
                return wrong_results
        findings = [check.look(trial, ran) for check in self.checks]
        for finding in findings:
            if finding.grade is Grade.NOT_YET:
                return finding
        if message := dishonest(ran):
            return Finding(Grade.NOT_YET, f"{message}.")
        messages = "; ".join(finding.message for finding in findings if finding.message)
        graded = [finding.grade for finding in findings if finding.message]
        who = {1: "it has", 2: "both ranks have"}.get(trial.ranks, f"all {trial.ranks} ranks have")
        result = f"{who} the result of one process"
        return Finding(min(graded, default=Grade.PASS), f"{result}; {messages}." if messages else f"{result}.")

    def _results(self, inputs: Inputs, answers: list[Any]) -> Finding | None:
        """What is wrong with the results, rank by rank."""
        truths = list(self.truth(inputs))
        wrong = {
            rank: found
            for rank, (truth, answer) in enumerate(zip(truths, answers, strict=True))
            if (found := difference(truth, answer, rel=self.rel, abs_=self.abs_)) is not None
        }
        if not wrong:
            return None
        alike: dict[str, list[int]] = {}
        for rank, found in wrong.items():
            alike.setdefault(str(found), []).append(rank)
        texts = [f"{_ranks(ranks)}: {found}" for found, ranks in alike.items()]
        more = f"; {len(wrong)} of {len(answers)} ranks are wrong"
        return not_yet("; ".join(texts[:SHOWN]) + more, self._cause(inputs, truths, answers))

    def _cause(self, inputs: Inputs, truths: list[Any], answers: list[Any]) -> str:
        def all_are(expected: Sequence[Any]) -> bool:
            pairs = zip(expected, answers, strict=True)
            return all(difference(a, b, rel=self.rel, abs_=self.abs_) is None for a, b in pairs)

        for mistaken, cause in self.causes:
            if all_are(mistaken(inputs)):
                return cause
        ranks = len(answers)
        if not all(isinstance(truth, float) or hasattr(truth, "shape") for truth in truths):
            return ""
        if all_are([truth * 0 for truth in truths]):
            return "all of it is zero: was anything communicated into what you return?"
        if all_are([truth * ranks for truth in truths]):
            return f"it is {ranks} times too large: a sum over {ranks} ranks where the mean is asked for"
        if all_are([truth / ranks for truth in truths]):
            return f"it is {ranks} times too small: divided once too often"
        for shift in range(1, ranks):
            if all_are([truths[(rank + shift) % ranks] for rank in range(ranks)]):
                return f"every rank holds what rank + {shift} should"
        return ""


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _own(value: Any) -> Any:
    """A tensor, or a list of them, with storages of its own: of a view the whole storage would travel."""
    if isinstance(value, list):
        return [_own(item) for item in value]
    return value.clone() if hasattr(value, "clone") else value
