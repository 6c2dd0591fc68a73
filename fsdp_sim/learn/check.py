"""``check(name, solution)``: run a learner's function apart from the notebook and say what is wrong with it."""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from msgspec import structs

from fsdp_sim.learn import mine, progress
from fsdp_sim.learn.apart import StoppedError, carry_out
from fsdp_sim.learn.exercise import AS_GIVEN, IS_A_STUB, Exercise
from fsdp_sim.learn.find import load
from fsdp_sim.learn.predictions import causes
from fsdp_sim.learn.verdict import Finding, Grade, Use, Verdict

if TYPE_CHECKING:
    from fsdp_sim.ranks import Limits


MAX_MESSAGE = 1200  # characters


def check(name: str, solution: Callable[..., Any]) -> Verdict:
    """Check a solution of an exercise, and keep the result in the learner's progress; put an accepted part of
    ``my_fsdp.py`` into that file.

    The solution runs in processes of its own with limits on time, memory, threads and processes. Whatever it does, the
    answer is a verdict. Of a seeded fault it says at first what is observed, and the cause only to who has changed the
    code or named a cause.

    Raises:
        ValueError: there is no such exercise; the message names the nearest.
        TypeError: the solution is not a function.
    """
    exercise = load(name)
    name = exercise.name
    if not callable(solution):
        raise TypeError(f"check({name!r}, {solution!r}): the second argument is your function, without calling it")
    named = progress.estimates().get(name)
    verdict = judge(exercise, solution, told=named is not None)
    tried = not is_as_given(exercise, solution)  # to run all cells is no try

    def note(entry: progress.ExerciseEntry) -> progress.ExerciseEntry:
        return structs.replace(entry, tries=entry.tries + tried, grade=max(entry.grade, int(verdict.grade)))

    more = [progress.change(name, note)]
    if verdict.passed and exercise.cause:
        more.insert(0, causes.told(name, exercise.cause, named))
    if verdict.passed and name in mine.chapters():
        try:
            more.append(mine.put(name, mine.source_of(solution, name)))
        except ValueError as error:
            more.append(f"It is not in {mine.FILE}: {error}.")
    return replace(verdict, message=" ".join(filter(None, (verdict.message, *more))))


def judge(
    exercise: Exercise, solution: Callable[..., Any], limits: Limits | None = None, *, told: bool = False
) -> Verdict:
    """The verdict on a solution; nothing is kept.

    Args:
        told: the cause of a seeded fault may be told of the code as it was given.
    """
    seed = os.environ.get("FSDP_SIM_SEED")  # set where notebooks are built and compared
    trial = exercise.judge.trial(int(seed) if seed else random.SystemRandom().randrange(2**32))
    try:
        ran = carry_out(trial, solution, limits)
    except StoppedError as stopped:
        finding, printed = Finding(Grade.NOT_YET, str(stopped), stopped.cure), stopped.printed
    else:
        printed = ran.printed
        try:
            finding = _stub(ran.answers) or exercise.judge.grade(trial, ran, exercise.wrong)
        except Exception as error:  # an answer that no judge has thought of is a wrong answer
            finding = Finding(Grade.NOT_YET, f"what it returned cannot be judged ({type(error).__name__}: {error}).")
    use = Use(solution, "your") if finding.grade else Use(exercise.reference, "the reference solution of")
    said = finding.whole
    if exercise.cause and not finding.grade and is_as_given(exercise, solution):
        said = f"{finding.whole if told else finding.symptom} This is {AS_GIVEN}."
        if not told:
            said += f' What is its cause? Say it with `predict("{exercise.name}")`, or mend it.'
    message = " ".join(said.split())
    if len(message) > MAX_MESSAGE:
        message = f"{message[:MAX_MESSAGE]} ..."
    return Verdict(exercise.name, finding.grade, message, use, printed)


def is_as_given(exercise: Exercise, solution: Callable[..., Any]) -> bool:
    """The code is the stub's; comments do not count."""
    try:
        codes = [ast.parse(mine.source_of(function, exercise.name)) for function in (solution, exercise.stub)]
    except ValueError:  # it cannot be read, so it is no cell as it was given
        return False
    return ast.dump(codes[0]) == ast.dump(codes[1])


def _stub(answers: list[list[Any]]) -> Finding | None:
    given = [answer for of_rank in answers for answer in of_rank]
    if any(answer is not None and answer is not ... for answer in given):
        return None
    if ... in given:
        return Finding(Grade.NOT_YET, f"it {IS_A_STUB}: it returns nothing yet; write the answer after `return`.")
    return Finding(Grade.NOT_YET, "it returns nothing: write the answer after `return`; printing it is not enough.")
