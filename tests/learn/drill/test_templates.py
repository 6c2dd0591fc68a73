"""Every template, many times: agrees with another computation, gives nothing away, and takes no wrong unit.

A hundred and twenty instances of each: of the first 300 the last that takes a line which no other took is number 107.
"""

import dataclasses
import importlib
import math
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fsdp_sim.learn.drill.question import Choice, Number, Order, Question, UnreadableError
from fsdp_sim.learn.drill.template import TOPICS, QuestionTemplate, templates
from fsdp_sim.learn.quantity import SCALES, needs_unit, written

MASTERS = Path(__file__).parents[3] / "notebooks" / "masters"
ALL = list(templates().values())
each = pytest.mark.parametrize("template", ALL, ids=lambda template: template.name)


@cache
def instances(template: QuestionTemplate) -> list[Question]:
    return [template.ask(seed) for seed in range(120)]


def oracle(template: QuestionTemplate) -> Callable[..., Any]:
    module = importlib.import_module(f"tests.learn.drill.oracles.{template.topic}")
    return getattr(module, template.name)


def test_there_are_at_least_sixty_and_every_topic_has_some() -> None:
    assert len(ALL) >= 60
    assert {template.topic for template in ALL} == set(TOPICS)


@each
def test_instances_agree_with_an_independent_computation(template: QuestionTemplate) -> None:
    for question in instances(template):
        expected = oracle(template)(**question.given)
        if isinstance(question, Number):
            assert math.isfinite(question.answer)
            assert question.accepts(expected), (question.text, question.answer, expected)
        else:
            assert question.answer == expected, question.text


@each
def test_the_right_answer_is_accepted_as_it_is_printed(template: QuestionTemplate) -> None:
    for question in instances(template)[:100]:
        typed = question.expected.partition(")")[0] if isinstance(question, Choice) else question.expected
        assert question.grade(typed).right, (question.text, typed)


@each
def test_the_numbers_differ_from_one_instance_to_the_next(template: QuestionTemplate) -> None:
    assert len({question.text for question in instances(template)}) >= 4
    assert template.ask(7) == template.ask(7)


@each
def test_the_text_does_not_give_the_answer_away(template: QuestionTemplate) -> None:
    for question in instances(template):
        if isinstance(question, Number) and (needs_unit(question.unit) or question.answer >= 100):
            shown = re.escape(written(question.answer, question.unit))
            assert not re.search(rf"(?<![\d.]){shown}(?![\d.]*\d)", question.text), question.text


@each
def test_a_known_slip_is_answered_with_its_cause(template: QuestionTemplate) -> None:
    said = set()
    for question in instances(template):
        if isinstance(question, Number):
            for mistake in question.mistakes:
                if not question.accepts(mistake.value):
                    typed = f"{mistake.value!r} {written(1, question.unit).lstrip('1 ')}"
                    reply = question.grade(typed)
                    assert not reply.right
                    assert reply.cause, (typed, question.text)
                    said.add(reply.cause)
        elif isinstance(question, Choice):
            for option, cause in question.wrong.items():
                reply = question.grade("abcdefghij"[question.options.index(option)])
                assert not reply.right
                assert reply.cause == cause
                said.add(cause)
    kinds = {type(question) for question in instances(template)}
    assert kinds == {Order} or said, "no wrong answer of this template has a cause"


@each
def test_a_wrong_unit_is_no_answer(template: QuestionTemplate) -> None:
    for question in instances(template)[:50]:
        if isinstance(question, Number):
            other = "GB" if question.unit != "bytes" else "ms"
            with pytest.raises(UnreadableError):
                question.grade(f"{question.answer} {other}")
            if question.unit in SCALES:
                with pytest.raises(UnreadableError, match="unit"):
                    question.grade(f"{question.answer:f}")


@each
def test_it_is_written_to_be_read_alone(template: QuestionTemplate) -> None:
    for question in instances(template)[:50]:
        assert 30 < len(question.text) < 900, len(question.text)
        assert question.why
        assert not re.search(r"\bnan\b|\binf\b|None|\{|\d{8,}", f"{question.text} {question.why}"), question.text
    assert 15 < len(template.rule) < 190, len(template.rule)
    assert template.rule.endswith(".")
    assert 15 <= template.seconds <= 600


@each
def test_every_drawn_thing_is_given(template: QuestionTemplate) -> None:
    """The same ``given`` means the same answer: nothing that matters was drawn and not said."""
    answers: dict[str, Any] = {}
    for question in instances(template):
        answer = question.answer  # type: ignore[attr-defined]
        assert answers.setdefault(repr(question.given), answer) == answer
    assert dataclasses.is_dataclass(template)
