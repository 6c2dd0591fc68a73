"""Every exercise there is, held to what a learner may expect: its stub, its solution, every wrong answer and shortcut.

Authors add a file under ``fsdp_sim/learn/exercises`` and nothing here. The answers to an exercise take turns on the
same ranks (see `tests.learn.together`); ``make test-all`` judges those to one of each kind on ranks of their own, as a
learner's. They draw the same every time; ``FSDP_SIM_SEED=7 python -m pytest tests/learn/test_exercises.py`` draws
others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest

from fsdp_sim.learn import apart
from fsdp_sim.learn.check import judge
from fsdp_sim.learn.exercise import IS_A_STUB, Exercise, ExerciseKind
from fsdp_sim.learn.find import load_all
from fsdp_sim.learn.sources import missing, unknown
from fsdp_sim.learn.verdict import Grade, Verdict
from tests.learn.together import BRIEF_S, verdicts

EXERCISES = load_all()
MAX_MESSAGE = 900  # characters
each = pytest.mark.parametrize("exercise", EXERCISES, ids=[exercise.name for exercise in EXERCISES])


@pytest.fixture(scope="module", autouse=True)
def seed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SIM_SEED", os.environ.get("FSDP_SIM_SEED", "1"))
        yield


@dataclass(frozen=True)
class Case:
    """An answer to an exercise and what `check` is to say to it."""

    kind: str  # stub, reference, wrong, shortcut
    answer: Callable[..., Any]
    says: str


def cases(exercise: Exercise) -> list[Case]:
    found = [Case("reference", exercise.reference, ""), Case("stub", exercise.stub, exercise.stub_says)]
    found += [Case("wrong", wrong.function, wrong.message) for wrong in exercise.wrong]
    return found + [Case("shortcut", wrong.function, wrong.message) for wrong in exercise.shortcuts]


def of_kind(kind: ExerciseKind) -> Exercise:
    return next(exercise for exercise in EXERCISES if exercise.kind is kind)


def amiss(exercise: Exercise, case: Case, verdict: Verdict) -> str:
    """What is not as it should be about a verdict, or nothing."""
    best = {Grade.GOOD, Grade.OPTIMAL} if exercise.targets else {Grade.PASS}
    expected = {
        "passed": verdict.passed == (case.kind == "reference"),
        "the best grade there is": case.kind != "reference" or verdict.grade in best,
        "the message": case.says in verdict.message,
        "known as the stub": (IS_A_STUB in verdict.message) <= (case.kind == "stub"),
        "one paragraph": "\n" not in verdict.message and 10 < len(verdict.message) <= MAX_MESSAGE,
        "what the rest goes on with": verdict.passed or verdict.use.function is exercise.reference,
    }
    wrong = [what for what, is_so in expected.items() if not is_so]
    return f"{case.kind} {case.answer.__name__}, expected {case.says!r}: {', '.join(wrong)}: {verdict}" if wrong else ""


@pytest.mark.slow
@each
def test_stub_reference_wrong_answers_and_shortcuts_get_the_verdict_they_should(exercise: Exercise) -> None:
    some = cases(exercise)
    found = verdicts(exercise, [case.answer for case in some])
    for case, verdict in zip(some, found, strict=True):
        for timeout_s in (BRIEF_S, apart.TIMEOUT_S):  # alone: an answer before it may have left something
            if verdict is None or amiss(exercise, case, verdict):
                with patch.object(apart, "TIMEOUT_S", timeout_s):
                    verdict = judge(exercise, case.answer, told=True)
        assert not amiss(exercise, case, verdict)


@pytest.mark.tail
@pytest.mark.parametrize("exercise", [of_kind(kind) for kind in ExerciseKind], ids=lambda exercise: exercise.name)
def test_the_same_on_ranks_of_its_own(exercise: Exercise) -> None:
    """One of each kind; `tests/learn/classroom/test_grading.py` has the other solutions judged so."""
    for case in cases(exercise):
        assert not amiss(exercise, case, judge(exercise, case.answer, told=True))


def test_a_solution_can_be_read_alone() -> None:
    """It is one function, as the learner writes it."""
    lacking = {exercise.name: missing(exercise) for exercise in EXERCISES}

    assert {name: names for name, names in lacking.items() if names} == {}, "neither imported nor a function's own"


def test_what_edits_bring_in_is_imported() -> None:
    assert {name for exercise in EXERCISES for name in unknown(exercise)} == set()


def test_every_kind_of_exercise_is_there() -> None:
    assert {exercise.kind for exercise in EXERCISES} == set(ExerciseKind)


def test_titles_are_told_apart() -> None:
    assert len({exercise.title for exercise in EXERCISES}) == len(EXERCISES)
