"""An interview adapts, mixes, keeps what was missed and reports."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fsdp_sim.learn.drill import record
from fsdp_sim.learn.drill.committee import decision
from fsdp_sim.learn.drill.heard import summary
from fsdp_sim.learn.drill.interview import SPOKEN_EVERY, Interview, InterviewTurn
from fsdp_sim.learn.drill.listening.follow import Conversation, Part
from fsdp_sim.learn.drill.question import Choice, UnreadableError
from fsdp_sim.learn.drill.report import InterviewReport
from fsdp_sim.learn.drill.spoken import SpokenQuestion, spoken
from fsdp_sim.learn.drill.template import TOPICS, templates
from fsdp_sim.learn.find import names


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def right(interview: Interview) -> None:
    turn = interview.ask()
    assert turn is not None
    if isinstance(turn.source, SpokenQuestion):
        interview.say(" ".join(turn.source.points))
        for place in turn.talk.missing if turn.talk else ():
            interview.overrule(f"{'abcdefg'[place]} I said these very words")
        interview.settle()
    elif isinstance(turn.question, Choice):
        interview.answer(turn.question.expected[0])
    else:
        assert turn.question is not None
        interview.answer(turn.question.expected)


def wrong(interview: Interview) -> None:
    assert interview.ask()
    interview.skip()


def take(interview: Interview, how: Callable[[Interview], None], times: int) -> None:
    for _ in range(times):
        how(interview)


def test_it_gets_harder_after_right_answers_and_easier_after_wrong_ones() -> None:
    interview = Interview(seed=1)
    take(interview, right, 6)
    assert [result.level for result in interview.results][3:] == [3, 3, 3]
    take(interview, wrong, 6)
    assert [result.level for result in interview.results][-3:] == [1, 1, 1]


def test_topics_take_turns_and_no_question_comes_twice() -> None:
    interview = Interview(seed=2)
    take(interview, right, len(TOPICS))
    assert {result.topic for result in interview.results} == set(TOPICS)
    take(interview, wrong, 2 * len(TOPICS))
    names = [result.name for result in interview.results]
    assert len(set(names)) == len(names)


def test_every_fourth_is_spoken() -> None:
    interview = Interview(seed=3)
    kinds = []
    for _ in range(2 * SPOKEN_EVERY):
        turn = interview.ask()
        assert turn
        kinds.append(isinstance(turn.source, SpokenQuestion))
        right(interview)
    assert kinds == ([False] * (SPOKEN_EVERY - 1) + [True]) * 2


def test_it_ends_with_its_time_and_not_in_the_middle_of_a_question() -> None:
    clock = Clock()
    interview = Interview(limit_s=60, clock=clock, seed=4)
    assert interview.ask()
    clock.now_s = 61
    assert interview.ask(), "the question that was asked may be answered"
    right(interview)
    assert interview.ask() is None
    with pytest.raises(ValueError, match="no question waits"):
        interview.skip()


def test_what_cannot_be_read_is_asked_again() -> None:
    interview = Interview(seed=6, with_spoken=False)
    turn = interview.ask()
    with pytest.raises(UnreadableError):
        interview.answer("~")
    assert interview.ask() is turn
    assert not interview.results


def test_a_missed_question_comes_back_first() -> None:
    missed = Interview(seed=7, with_spoken=False)
    wrong(missed)
    name = missed.results[0].name
    past = datetime.now(UTC) - timedelta(hours=1)
    record.note(name, right=False, took_s=10, given_s=60, now=past)
    again = Interview(seed=8, with_spoken=False, due_first=True).ask()
    assert again
    assert again.source.name == name


def test_what_is_known_comes_later_each_time_and_what_is_missed_within_minutes() -> None:
    now, name = datetime(2030, 1, 1, tzinfo=UTC), next(iter(templates()))
    waits = []
    for _ in range(5):
        record.note(name, right=True, took_s=10, given_s=60, now=now)
        waits.append(record.read()[name].due - now)
        now = record.read()[name].due
    assert waits == sorted(waits)
    assert waits[-1] > timedelta(days=10)
    record.note(name, right=False, took_s=10, given_s=60, now=now)
    assert record.read()[name].due - now < timedelta(hours=1)
    assert record.due([name], now) == []
    assert record.due([name], now + timedelta(days=1)) == [name]
    assert (record.read()[name].times, record.read()[name].right) == (6, 5)


def test_a_topic_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="nccl"):
        Interview(topics=("nccl",))


def test_the_report_has_strengths_gaps_and_where_to_read() -> None:
    clock = Clock()
    interview = Interview(seed=9, topics=("memory", "overlap"), with_spoken=False, clock=clock)
    for _ in range(6):
        turn = interview.ask()
        assert turn
        clock.now_s += turn.source.seconds / 2
        (right if turn.source.topic == "memory" else wrong)(interview)
    report = InterviewReport(tuple(interview.results))
    assert report.headline == "3 of 6 right. Strengths: memory. Gaps: overlap."
    assert [row.topic for row in report.rows] == ["overlap", "memory"]
    section = next(result.section for result in interview.results if result.topic == "overlap")
    assert f"notebook {section[:2]}, section {section[3:]}" in str(report)
    assert "50%" in str(report)
    assert report._repr_html_().count("<tr>") == 3


def spoken_turn(name: str) -> Interview:
    """An interview that waits for what one says to a question."""
    interview, source = Interview(seed=1), spoken()[name]
    interview.turn = InterviewTurn(1, source, 1, None, 0.0, Conversation(source))
    return interview


def test_letters_alone_pass_no_more() -> None:
    interview = spoken_turn("walk_through_a_step")
    interview.say("a b c d e f g")
    assert interview.turn
    assert not interview.settle()


def test_what_is_claimed_needs_a_reason_and_is_kept() -> None:
    interview = spoken_turn("clip_the_gradients")
    interview.say("Each rank adds up the squares of its shards, an all-reduce adds those, then the root.")
    with pytest.raises(UnreadableError, match="say why"):
        interview.overrule("b")
    with pytest.raises(UnreadableError, match="letter of a point"):
        interview.overrule("z because I said so")
    with pytest.raises(UnreadableError, match="put a minus before it: -a"):
        interview.overrule("a I have said it")
    interview.overrule("c) I meant torch's own function")
    interview.overrule("d by the method of the model")
    interview.overrule("f the norm of one process")
    assert interview.settle()
    assert record.read()["clip_the_gradients"].overruled["c"] == "I meant torch's own function"


def answered_but_not_heard() -> Interview:
    """To the first follow-up something was said that the listener did not hear."""
    interview = spoken_turn("walk_through_a_step")
    interview.say(" ".join(spoken()["walk_through_a_step"].points))
    talk = interview.turn.talk if interview.turn else None
    assert talk
    while talk.part is not Part.LADDER:
        interview.say(talk.source.points[talk.missing[0]])
    interview.say("as I told you at the very beginning")
    assert talk.claimable == ["1"]
    return interview


def test_a_follow_up_that_was_not_heard_is_claimed_like_a_point_and_the_next_one_is_asked() -> None:
    interview = answered_but_not_heard()
    with pytest.raises(UnreadableError, match="say why"):
        interview.overrule("1 I did")
    with pytest.raises(UnreadableError, match=r"2\) is no follow-up that you answered"):
        interview.overrule("2 I did say that")
    interview.overrule("1) I did say that")
    talk = interview.turn.talk if interview.turn else None
    assert talk
    assert talk.asks == talk.source.ladder[1].question
    interview.say("")
    assert talk.claimable == [], "nothing was said to the second"
    marks = {line[2:4]: (line[0], line.rpartition("? ")[2]) for line in summary(talk)}
    assert (marks["1)"], marks["2)"][0]) == (("○", "You claim it: I did say that"), "✗")
    interview.settle()
    assert record.read()["walk_through_a_step"].overruled == {"1": "I did say that"}
    report = decision([*interview.results] * 4)
    assert "4 of 8 follow-ups answered. 4 follow-ups the candidate claims and the listener did not hear." in report


def test_what_was_heard_wrongly_is_given_back_and_counts_no_more() -> None:
    interview = spoken_turn("clip_the_gradients")
    interview.say(" ".join(spoken()["clip_the_gradients"].points))
    talk = interview.turn.talk if interview.turn else None
    assert talk
    while talk.part is Part.MISSING:
        interview.say(talk.source.points[talk.missing[0]])
    interview.say(talk.source.ladder[0].strong)
    interview.say("")
    assert talk.good
    with pytest.raises(UnreadableError, match="what did you mean"):
        interview.overrule("-a")
    with pytest.raises(UnreadableError, match=r"2\) does not count"):
        interview.overrule("-2 I said nothing there")
    interview.overrule("-a that was about DDP")
    interview.overrule("-1 I only guessed that one")
    assert (talk.good, talk.answered, 0 in talk.first) == (False, [], False)
    gave = [line for line in summary(talk) if "You gave it back" in line]
    assert [line[:4] for line in gave] == ["✗ a)", "✗ 1)"]
    interview.settle()
    kept = {"-a": "that was about DDP", "-1": "I only guessed that one"}
    assert record.read()["clip_the_gradients"].overruled == kept
    report = decision([*interview.results] * 4)
    assert "4 points and 4 follow-ups the listener heard and the candidate gave back." in report


def test_what_was_given_back_may_be_claimed_again() -> None:
    talk = Conversation(spoken()["clip_the_gradients"])
    talk.say(talk.source.points[0])
    talk.correct("-a that was about DDP")
    talk.correct("a no, it was about FSDP")
    assert (talk.given_back, talk.overruled) == ({}, {"a": "no, it was about FSDP"})


def test_the_committee_quotes_the_candidate_and_says_what_to_do() -> None:
    interview = spoken_turn("fsdp1_and_fsdp2")
    interview.say("FSDP2 has DTensors instead of flat parameters. FSDP2 needs record_stream.")
    interview.settle()
    report = InterviewReport(tuple(interview.results))
    parts = report.committee
    assert "at least 4 questions" in parts["Level"][0]
    assert any("“FSDP2 has DTensors instead of flat parameters.”" in line for line in parts["Evidence"])
    assert any("record_stream" in line and "contrary" in line for line in parts["Gaps"])
    assert any("notebook 11" in line and "ddp_step_to_fsdp2" in line for line in parts["This week"])
    assert "&lt;" not in report.page()
    assert report.page().count("<h4>") == 4


def test_what_to_read_this_week_is_a_link_to_a_notebook_and_exercises_that_are_there() -> None:
    interview = spoken_turn("fsdp1_and_fsdp2")
    interview.skip()
    report = InterviewReport(tuple(interview.results))
    (line,) = [line for line in report.committee["This week"] if line.startswith("Read ")]
    (link,) = re.findall(r'href="([^"]+)"', report._repr_html_())
    assert (Path(__file__).parents[3] / "notebooks" / link).is_file()
    assert set(line.partition("the exercises ")[2].rstrip(".").split(", ")) <= names().keys()
    assert "href" not in report.page(), "it may lie anywhere"


def test_a_report_of_nothing_says_so() -> None:
    assert str(InterviewReport(())) == "No question was answered."


def test_the_report_quotes_the_option_that_was_chosen_and_not_its_letter() -> None:
    interview = Interview(seed=5, topics=("overlap",), with_spoken=False)
    while not ((turn := interview.ask()) and isinstance(turn.question, Choice)):
        interview.skip()
    interview.answer("b")
    assert interview.results[-1].typed == turn.question.lettered[1]
