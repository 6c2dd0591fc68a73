"""A seeded fault is known by a number, shows its symptom first, and asks for its cause before it is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from fsdp_sim.learn import check, predict, progress
from fsdp_sim.learn.check import is_as_given, judge
from fsdp_sim.learn.edit import made, source_of
from fsdp_sim.learn.exercise import AS_GIVEN, Exercise, ExerciseKind
from fsdp_sim.learn.find import cases, former, load, load_all
from fsdp_sim.learn.predictions.causes import CHOICES, question
from fsdp_sim.learn.sources import stub_source
from notebooks.masters import build

FAULTS = [exercise for exercise in load_all() if exercise.kind is ExerciseKind.FAULT]
NAME = "case_35"
SAID_OF_ANY = {"rank", "ranks", "this", "that", "only", "place", "argument", "collective"}
"""Words with which hangs, errors and numbers are told."""
each = pytest.mark.parametrize("fault", FAULTS, ids=list(former()))


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z]{4,}", text.lower()))


def as_written(source: str) -> Callable[..., Any]:
    function = made(NAME, source, f"{NAME}, as in a cell {hash(source)}", {})
    assert callable(function)
    return function


def test_every_fault_is_known_by_a_number_and_asked_once() -> None:
    asked = [name for master in build.masters() for name in build.exercises(master) if name in cases()]

    assert sorted(asked) == cases() == [fault.name for fault in FAULTS]
    assert cases() == [f"case_{number:02}" for number in range(1, len(asked) + 1)]


@each
def test_neither_code_nor_title_names_what_is_wrong(fault: Exercise) -> None:
    old = next(name for name, case in former().items() if case == fault.name)
    shown = f"{stub_source(fault)} {fault.title} {fault.contract}"

    assert fault.reference.__name__ == fault.name
    assert old not in shown
    assert fault.cause not in shown


@pytest.mark.slow
@each
def test_of_the_code_as_it_was_given_only_the_symptom_is_told(fault: Exercise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SIM_SEED", "1")
    known_before = words(f"{fault.title} {fault.contract} {source_of(fault.stub)}")

    symptom, given, asks = judge(fault, fault.stub).message.partition(AS_GIVEN)

    assert given, symptom
    assert f'predict("{fault.name}")' in asks
    assert words(symptom) & words(fault.cause) - known_before <= SAID_OF_ANY, symptom
    assert not re.search(r"[Tt]he cause|[Tt]o mend", symptom)


@each
def test_one_chooses_among_causes_of_which_one_is_right(fault: Exercise) -> None:
    asked = question(fault.name)

    assert len(asked.choices) == CHOICES
    assert [choice for choice in asked.choices if asked.commit(choice).right] == [fault.cause]
    assert set(asked.choices) <= {other.cause for other in FAULTS}


def test_causes_are_told_apart() -> None:
    assert len({fault.cause for fault in FAULTS}) == len(FAULTS)


def test_comments_do_not_make_another_program() -> None:
    fault = load(NAME)
    source = source_of(fault.stub).replace("def stub", f"def {NAME}")

    assert "mean(0)" in source
    for changed, same in ((f"# a note\n{source}", True), (source.replace("mean(0)", "mean(1)"), False)):
        function = as_written(changed)
        function.source = changed  # type: ignore[attr-defined]
        assert is_as_given(fault, function) is same
    assert not is_as_given(fault, fault.reference)


def test_the_cause_is_told_to_who_has_named_one_or_changed_the_code() -> None:
    fault = load(NAME)
    stub = fault.stub

    assert fault.stub_says not in check(NAME, fault.stub).message
    assert fault.stub_says in check(NAME, lambda tokens: stub(tokens)).message
    predict(NAME, question(NAME).choices[0])
    assert fault.stub_says in check(NAME, fault.stub).message


@pytest.mark.parametrize(("right", "says"), [(True, "You named it."), (False, "You had named another.")])
def test_whoever_has_mended_it_is_told_the_cause_when_one_is_named(right: bool, says: str) -> None:
    fault, asked = load(NAME), question(NAME)

    before = check(NAME, fault.reference).message
    assert fault.cause not in before
    assert before.endswith(f'What was the cause? Say it with `predict("{NAME}")`.')

    predict(NAME, next(choice for choice in asked.choices if asked.commit(choice).right is right))
    assert check(NAME, fault.reference).message.endswith(f"The cause was: {fault.cause}. {says}")


def test_whoever_names_the_cause_of_what_is_mended_is_not_asked_to_mend_it() -> None:
    wrong = next(choice for choice in question(NAME).choices if not question(NAME).commit(choice).right)
    assert "Now mend it." in str(predict(NAME, wrong))

    assert check(NAME, load(NAME).reference).passed

    said = str(predict(NAME, wrong))
    assert f"You said “{wrong}”; it is “{load(NAME).cause}”. You have mended it already." in said


def test_what_is_no_fault_has_no_cause_to_name() -> None:
    with pytest.raises(ValueError, match="only of a seeded fault"):
        question("put_hooks")


def test_what_was_done_under_the_former_name_counts() -> None:
    old = next(name for name, case in former().items() if case == NAME)
    file = progress.path()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{{"exercises": {{"{old}": {{"tries": 2, "grade": 1}}}}, "version": 1}}')

    assert progress.entry(NAME).tries == 2
    assert load(old) is load(NAME)
    progress.change(NAME, lambda entry: structs.replace(entry, tries=entry.tries + 1))
    assert progress.entry(NAME) == progress.ExerciseEntry(tries=3, grade=1)
    assert old not in file.read_text()


def test_every_notebook_with_a_case_can_ask_for_its_cause() -> None:
    for master in build.masters():
        if set(build.exercises(master)) & set(cases()):
            assert re.search(r"from fsdp_sim.learn import .*\bpredict\b", master.read_text()), master.name
