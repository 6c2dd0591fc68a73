"""Spoken questions: complete, spread over topics and levels, taught by the course, and their numbers exist."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsdp_sim.learn.drill.spoken import FollowUp, SpokenQuestion, spoken
from fsdp_sim.learn.drill.template import LEVELS, TOPICS, templates

MASTERS = Path(__file__).parents[3] / "notebooks" / "masters"
ALL = list(spoken().values())
each = pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)


def six_points() -> SpokenQuestion:
    points = tuple(f"This is point {place}, which somebody makes." for place in range(6))
    ladder = (FollowUp("And then?", "That."),) * 3
    return SpokenQuestion("made_up", "memory", 1, 60, "01.1", "What is it?", points, ladder)


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


def test_sections_are_in_the_course() -> None:
    def headings(chapter: str) -> str:
        return next(MASTERS.glob(f"{chapter}_*.py")).read_text(encoding="utf-8")

    places = {entry.section.partition(".")[::2] for entry in (*ALL, *templates().values())}
    assert [
        place for place in sorted(places) if not re.search(rf"^# ## {place[1]}\. ", headings(place[0]), re.MULTILINE)
    ] == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"name": "Made up"}, "'Made up' should be a name of words_like_this"),
        ({"topic": "cooking"}, "made_up: 'cooking', 1, 60: the topic is one of memory, "),
        ({"level": 4}, "the level one of"),
        ({"seconds": 600}, "the seconds are 60 to 180"),
        ({"question": "What is it"}, "'What is it' should be plain sentences in ASCII that end with"),
        ({"points": ("One thing that is said, and no more.",)}, "needs four to seven different points"),
        ({"points": ("The same is said four times over.",) * 4}, "needs four to seven different points"),
        ({"points": tuple("abcd")}, "'a' has 1 characters; it should have 31 to 239"),
        ({"ladder": ()}, "three follow-ups"),
    ],
)
def test_what_is_not_as_it_should_be_is_refused(changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        replace(six_points(), **changed)


def test_an_answer_to_a_follow_up_is_short() -> None:
    with pytest.raises(ValueError, match="should be one to three sentences"):
        FollowUp("And then?", "One. Two. Three. Four.")


@each
def test_its_number_is_that_of_a_template(entry: SpokenQuestion) -> None:
    if not entry.number:
        assert entry.example(3) == ""
        return
    assert entry.number in templates()
    question = templates()[entry.number].ask(3)
    assert question.expected in entry.example(3)
    assert question.text in entry.example(3)
    assert entry.example(3) == entry.example(3)
    assert len({entry.example(seed) for seed in range(20)}) > 1


def test_good_needs_the_first_point_and_two_thirds() -> None:
    entry = six_points()

    assert entry.good({0, 1, 2, 5})
    assert not entry.good({0, 1, 2})
    assert not entry.good({1, 2, 3, 4, 5})
