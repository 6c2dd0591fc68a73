"""Every exercise there is, held to what a learner may expect: its stub, its solution, every wrong answer and shortcut.

Authors add a file under ``fsdp_sim/learn/exercises`` and nothing here. All checks share one warm fork server. They draw
the same every time; ``FSDP_SIM_SEED=7 python -m pytest tests/learn/test_exercises.py`` draws others.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import time
from collections.abc import Iterator

import pytest

from fsdp_sim.learn.check import judge
from fsdp_sim.learn.exercise import IS_A_STUB, Exercise, Kind, Wrong
from fsdp_sim.learn.find import load_all
from fsdp_sim.learn.sources import missing, solution_source
from fsdp_sim.learn.verdict import Grade, Verdict

EXERCISES = load_all()
MAX_MESSAGE = 900  # characters
COVERS = re.compile(r"(coverage 00[0-4]\.\d+|pitfall \d+|misconception (\d+|[0-4]\.\d+))")
MUTANTS = [
    pytest.param(exercise, wrong, id=f"{exercise.name}-{kind}{number}")
    for exercise in EXERCISES
    for kind, some in (("wrong", exercise.wrong), ("shortcut", exercise.shortcuts))
    for number, wrong in enumerate(some)
]
each = pytest.mark.parametrize("exercise", EXERCISES, ids=[exercise.name for exercise in EXERCISES])


@pytest.fixture(scope="module", autouse=True)
def seed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_SIM_SEED", os.environ.get("FSDP_SIM_SEED", "1"))
        yield


@pytest.fixture(scope="module", autouse=True)
def seconds(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """Seconds of checking by exercise, printed at the end."""
    spent: dict[str, float] = {}
    yield spent
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        lines = [f"{name:40} {taken_s:6.1f} s" for name, taken_s in sorted(spent.items(), key=lambda item: -item[1])]
        print("\n".join(["", *lines, f"{'all exercises':40} {sum(spent.values()):6.1f} s"]))


def checked(exercise: Exercise, solution: object, seconds: dict[str, float]) -> Verdict:
    start_s = time.monotonic()
    verdict = judge(exercise, solution)  # type: ignore[arg-type]
    seconds[exercise.name] = seconds.get(exercise.name, 0.0) + time.monotonic() - start_s
    assert "\n" not in verdict.message
    assert 10 < len(verdict.message) <= MAX_MESSAGE, verdict.message
    return verdict


@each
def test_the_stub_fails_with_the_intended_message(exercise: Exercise, seconds: dict[str, float]) -> None:
    verdict = checked(exercise, exercise.stub, seconds)

    assert not verdict.passed
    assert exercise.stub_says in verdict.message
    assert verdict.use.function is exercise.reference


@each
def test_the_reference_passes_with_the_best_grade_there_is(exercise: Exercise, seconds: dict[str, float]) -> None:
    verdict = checked(exercise, exercise.reference, seconds)

    assert verdict.passed, verdict
    assert verdict.grade in ({Grade.GOOD, Grade.OPTIMAL} if exercise.targets else {Grade.PASS}), verdict


@pytest.mark.parametrize(("exercise", "wrong"), MUTANTS)
def test_a_wrong_answer_or_shortcut_fails_with_its_own_message(
    exercise: Exercise, wrong: Wrong, seconds: dict[str, float]
) -> None:
    verdict = checked(exercise, wrong.function, seconds)

    assert not verdict.passed, verdict
    assert wrong.message in verdict.message
    assert IS_A_STUB not in verdict.message


@each
def test_the_header_is_complete(exercise: Exercise) -> None:
    assert isinstance(exercise.kind, Kind)
    assert exercise.difficulty in range(1, 6)
    assert exercise.importance in range(1, 6)
    assert 3 <= exercise.minutes <= 90
    assert exercise.title[0].isupper()
    assert exercise.title[-1] not in ".!"
    assert all(len(text) > 80 and "\n" not in text for text in (exercise.contract, exercise.why))
    assert exercise.covers
    assert all(COVERS.fullmatch(row) for row in exercise.covers), exercise.covers


@each
def test_stub_and_reference_are_called_alike_and_the_reference_has_the_name_of_the_exercise(exercise: Exercise) -> None:
    assert exercise.reference.__name__ == exercise.name
    assert list(inspect.signature(exercise.stub).parameters) == list(inspect.signature(exercise.reference).parameters)


@each
def test_there_is_a_wrong_answer_and_a_shortcut_and_their_messages_differ_from_the_stubs(exercise: Exercise) -> None:
    assert exercise.wrong
    assert exercise.shortcuts
    assert all(len(wrong.message) >= 8 for wrong in (*exercise.wrong, *exercise.shortcuts))


@each
def test_three_hints_that_do_not_give_the_solution_away(exercise: Exercise) -> None:
    body = ast.parse(solution_source(exercise)).body[0]
    assert isinstance(body, ast.FunctionDef)
    lines = [" ".join(ast.unparse(node).split()) for node in body.body]

    assert len(exercise.hints) == 3
    assert len(set(exercise.hints)) == 3
    assert all(20 < len(hint) < 300 and "\n" not in hint for hint in exercise.hints)
    assert not any(all(line in " ".join(hint.split()) for line in lines) for hint in exercise.hints)


@each
def test_the_solution_can_be_read_alone(exercise: Exercise) -> None:
    """It is one function, as the learner writes it."""
    text = solution_source(exercise)

    assert len(text.splitlines()) <= 30
    assert text.startswith(f"def {exercise.name}(")
    assert not missing(exercise), "these names are neither imported nor its own"


def test_every_kind_of_exercise_is_there() -> None:
    assert {exercise.kind for exercise in EXERCISES} == set(Kind)


def test_titles_are_told_apart() -> None:
    assert len({exercise.title for exercise in EXERCISES}) == len(EXERCISES)
