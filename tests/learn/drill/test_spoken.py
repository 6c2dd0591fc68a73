"""Spoken questions: complete, spread over topics and levels, taught by the course, and their numbers exist."""

import re
from collections import Counter
from pathlib import Path

import pytest

from fsdp_sim.learn.drill.question import UnreadableError
from fsdp_sim.learn.drill.spoken import FollowUp, Spoken, spoken
from fsdp_sim.learn.drill.template import LEVELS, TOPICS, templates

MASTERS = Path(__file__).parents[3] / "notebooks" / "masters"
ALL = list(spoken().values())
each = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)


def six_points() -> Spoken:
    points = tuple(f"This is point {place}." for place in range(6))
    ladder = (FollowUp("And then?", "That."),) * 3
    return Spoken("made_up", "memory", 1, 60, "01.1", "What is it?", points, ladder)


def test_there_are_at_least_25_and_three_of_every_topic() -> None:
    topics = Counter(entry.topic for entry in ALL)

    assert len(ALL) >= 25
    assert set(topics) == set(TOPICS)
    assert min(topics.values()) >= 3


def test_every_topic_is_asked_at_every_level_or_nearly() -> None:
    levels = {topic: {entry.level for entry in ALL if entry.topic == topic} for topic in TOPICS}

    assert {level for known in levels.values() for level in known} == set(LEVELS)
    assert min(len(known) for known in levels.values()) >= 2


def test_questions_are_told_apart() -> None:
    asked = [entry.question for entry in ALL] + [rung.question for entry in ALL for rung in entry.ladder]

    assert len(set(asked)) == len(asked)
    assert not {entry.name for entry in ALL} & set(templates())


def test_at_least_half_come_with_a_number() -> None:
    assert sum(bool(entry.number) for entry in ALL) * 2 >= len(ALL)


@each
def test_it_is_named_and_timed(entry: Spoken) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", entry.name)
    assert entry.topic in TOPICS
    assert entry.level in LEVELS
    assert 60 <= entry.seconds <= 180


@each
def test_its_section_is_in_the_course(entry: Spoken) -> None:
    chapter, _, number = entry.section.partition(".")
    master = next(MASTERS.glob(f"{chapter}_*.py")).read_text(encoding="utf-8")
    assert re.search(rf"^# ## {number}\. ", master, re.MULTILINE), entry.section


@each
def test_points_are_four_to_seven_different_sentences(entry: Spoken) -> None:
    assert 4 <= len(entry.points) <= 7
    assert len(set(entry.points)) == len(entry.points)
    for point in entry.points:
        assert point.endswith("."), point
        assert 30 < len(point) < 240, point


@each
def test_the_ladder_has_three_follow_ups(entry: Spoken) -> None:
    assert entry.question.endswith(("?", "."))
    assert len(entry.ladder) == 3
    for rung in entry.ladder:
        assert rung.question.endswith("?"), rung.question
        assert rung.strong.endswith("."), rung.strong
        assert 1 <= len(re.findall(r"[.?](?= |$)", rung.strong)) <= 3, rung.strong
        assert len(rung.strong) < 420, rung.strong


@each
def test_it_is_written_plainly(entry: Spoken) -> None:
    said = (entry.question, *entry.points, *(text for rung in entry.ladder for text in (rung.question, rung.strong)))
    for text in said:
        assert text.isascii(), text
        assert not re.search(r"!|  |\n|\bTODO\b", text), text


@each
def test_its_number_is_that_of_a_template(entry: Spoken) -> None:
    if not entry.number:
        assert entry.example(3) == ""
        return
    assert entry.number in templates()
    question = templates()[entry.number].ask(3)
    assert question.expected in entry.example(3)
    assert question.text in entry.example(3)
    assert entry.example(3) == entry.example(3)
    assert len({entry.example(seed) for seed in range(20)}) > 1


@each
def test_all_points_are_a_good_answer_and_none_is_not(entry: Spoken) -> None:
    letters = "abcdefg"[: len(entry.points)]

    assert entry.good(entry.made(letters))
    assert not entry.good(entry.made(letters[1:]))
    assert not entry.good(entry.made(""))


def test_good_needs_the_first_point_and_two_thirds() -> None:
    entry = six_points()

    assert entry.good({0, 1, 2, 5})
    assert not entry.good({0, 1, 2})
    assert not entry.good({1, 2, 3, 4, 5})


def test_what_was_made_is_typed_as_letters() -> None:
    entry = six_points()

    assert entry.made("a c f") == {0, 2, 5}
    assert entry.made("AB") == entry.made("b, a") == {0, 1}
    assert entry.made("") == entry.made(" - ") == set()


@pytest.mark.parametrize("typed", ["g", "a a", "a 1", "all of them"])
def test_other_letters_are_no_answer(typed: str) -> None:
    with pytest.raises(UnreadableError):
        six_points().made(typed)
