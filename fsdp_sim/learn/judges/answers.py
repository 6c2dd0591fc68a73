"""Judges of what can be compared: `Numbers` (also read from a timeline) and `OperationOrder` (of a schedule)."""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.compare import difference
from fsdp_sim.learn.exercise import Wrong
from fsdp_sim.learn.quantity import unit_meant
from fsdp_sim.learn.verdict import Finding, Grade

Case = tuple[Any, ...]
Cases = Sequence[Case] | Callable[[random.Random], Sequence[Case]]
"""The arguments of one call each, or a function that draws them."""


def drawn(cases: Cases, seed: int) -> tuple[Case, ...]:
    """The cases of a trial."""
    return tuple(cases(random.Random(seed)) if callable(cases) else cases)


def named(where: str, truth: Callable[..., Any], case: Case) -> str:
    """``where`` with the arguments of a case in its braces, by the names that ``truth`` gives them."""
    return where.format(**dict(zip(inspect.signature(truth).parameters, case, strict=False)))


def looks_like(answers: Sequence[Any], cases: Sequence[Case], wrong: Sequence[Wrong], **how: Any) -> str:
    """The cause of the first known wrong answer that gives the same answers, or nothing."""
    for known in wrong:
        try:
            its = [known.function(*case) for case in cases]
        except Exception:  # it is wrong; it may fail where the learner's does not
            continue
        if all(difference(a, b, **how) is None for a, b in zip(its, answers, strict=True)):
            return known.message
    return ""


def not_yet(what: str, cause: str) -> Finding:
    """What is wrong, then the cause where one is known."""
    end = "" if cause.endswith("?") else "."
    return Finding(Grade.NOT_YET, f"{what}.", f" The cause: {cause}{end}" if cause else "")


@dataclass(frozen=True)
class Numbers:
    """Numbers, alone or in lists, dicts or tensors, for each case.

    Attributes:
        truth: computes what is right, from the library: called in the notebook's process with each case.
        source: where the truth comes from, to be named in the message: "counted in the program that torch issues".
        cases: the arguments of each call; better a function that draws them than a table that can be looked up.
        where: names a case in the message; arguments in braces: "for {layers} blocks".
        unit: of the numbers: ``bytes``, ``s``, or what is counted; answers may be texts such as "7.9 GB".
        rel, abs_: how far an answer may be off.
    """

    truth: Callable[..., Any]
    source: str
    cases: Cases = ((),)
    where: str = ""
    unit: str = ""
    rel: float = 1e-9
    abs_: float = 0.0

    def trial(self, seed: int) -> Trial:
        return Trial((drawn(self.cases, seed),))

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        cases, answers = trial.each[0], ran.answers[0]
        truths = [self.truth(*case) for case in cases]
        how: dict[str, Any] = {"unit": self.unit, "rel": self.rel, "abs_": self.abs_}
        for case, right, answer in zip(cases, truths, answers, strict=True):
            found = difference(right, answer, **how)
            if found is not None:
                cause = looks_like(answers, cases, wrong, **how) or self._slip(truths, answers)
                at = f"{named(self.where, self.truth, case)}: " if self.where else ""
                return not_yet(f"{at}{found} ({self.source})", cause)
        many = f" for {len(cases)} cases drawn at random" if callable(self.cases) else ""
        return Finding(Grade.PASS, f"it agrees with what was {self.source}{many}.")

    def _slip(self, truths: list[Any], answers: list[Any]) -> str:
        pairs = list(zip(truths, answers, strict=True))
        if not all(isinstance(x, (int, float)) and x for pair in pairs for x in pair):
            return ""
        meant = {unit_meant(answer / truth, self.unit) for truth, answer in pairs}
        return f"that is in {meant.pop()}; asked for are {self.unit}" if len(meant) == 1 and "" not in meant else ""


@dataclass(frozen=True)
class OperationOrder:
    """Operations in order, as a list of labels; the answer names the first place that differs, and why it is so.

    Attributes:
        truth: the right list for a case, from a program that the library builds.
        because: why an operation stands where it does: regular expressions that match its label, and a sentence.
    """

    truth: Callable[..., Sequence[str]]
    source: str
    because: Mapping[str, str]
    cases: Cases = ((),)
    where: str = ""
    _words: re.Pattern[str] = field(default=re.compile(r"\s+"), repr=False)

    def trial(self, seed: int) -> Trial:
        return Trial((drawn(self.cases, seed),))

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        cases, answers = trial.each[0], ran.answers[0]
        for case, answer in zip(cases, answers, strict=True):
            at = f"{named(self.where, self.truth, case)}, " if self.where else ""
            if not isinstance(answer, list) or not all(isinstance(label, str) for label in answer):
                return Finding(Grade.NOT_YET, f"{at}a list of labels is asked for, not {answer!r:.80}.")
            right = list(self.truth(*case))
            found = [self._words.sub(" ", label).strip() for label in answer]
            if found != right:
                cause = looks_like(answers, cases, wrong) or self._reason(right, found)
                return not_yet(f"{at}{self._first(right, found)} ({self.source})", cause)
        return Finding(Grade.PASS, f"the order is right: {self.source}.")

    @staticmethod
    def _place(right: list[str], found: list[str]) -> int:
        pairs = zip(right, found, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(right), len(found)))

    def _first(self, right: list[str], found: list[str]) -> str:
        i = self._place(right, found)
        expected = right[i] if i < len(right) else "nothing more"
        have = found[i] if i < len(found) else "nothing more"
        return f"place {i + 1} of {len(right)}: expected {expected}, found {have}"

    def _reason(self, right: list[str], found: list[str]) -> str:
        i = self._place(right, found)
        label = right[i] if i < len(right) else found[i]
        if i < len(found) and found[i].startswith(f"{label}("):
            return f"{label} is all that is asked for, without what stands in brackets"
        return next((reason for pattern, reason in self.because.items() if re.search(pattern, label)), "")
