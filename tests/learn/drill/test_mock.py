"""A mock interview in a notebook: by keys alone, with a report at its end."""

from __future__ import annotations

import ipywidgets

from fsdp_sim.learn.drill import mock
from fsdp_sim.learn.drill.interview import SPOKEN_EVERY
from fsdp_sim.learn.drill.listening.follow import Part


def widgets(shown: ipywidgets.Widget) -> tuple[ipywidgets.HTML, ipywidgets.Text, ipywidgets.HTML]:
    asked, box, replied = shown.children
    return asked, box, replied


def enter(box: ipywidgets.Text, text: str) -> None:
    box.value = text
    box._submission_callbacks(box)  # what the browser's Enter calls


def test_questions_are_answered_by_enter_and_the_report_comes_at_the_end() -> None:
    interview = mock(5, seed=1, design="dense_70b")
    asked, box, replied = widgets(interview._widget())
    first = interview.interview.ask()
    assert first
    assert first.text.partition(" ")[0] in asked.value
    enter(box, "~~")
    assert "I hear no number in that" in replied.value
    assert not interview.interview.results
    enter(box, "?")
    assert "It is " in replied.value
    assert box.value == ""
    assert interview.report.headline.startswith("0 of 1 right")
    enter(box, "q")
    assert "Train Llama 3 70B on 256 H100" in asked.value
    for said in ("Full sharding, <i>micro-batch 2</i> of 8192 tokens, a step takes 400 s", *"?" * 11):
        enter(box, said) if "<table>" not in asked.value else None
    assert "seconds per step: you say 400 s, the simulator" in asked.value
    assert "<table>" in asked.value
    enter(box, "?")
    assert len(interview.interview.results) == 1, "it has ended"


def test_a_spoken_question_is_talked_about_until_all_was_asked() -> None:
    interview = mock(5, seed=1)
    for _ in range(SPOKEN_EVERY - 1):
        interview.typed("?")
    turn = interview.interview.ask()
    assert turn
    assert turn.talk
    assert "what you would say" in interview.asked()
    said = interview.typed(f"<i>{turn.talk.source.points[1]}")
    assert "<u><b>" in said
    assert "<i>" not in said
    assert "What is missing: " in interview.asked()
    assert turn.talk.source.question not in interview.asked()
    while turn.talk.part is not Part.OVER:
        said = interview.typed("?")
    assert "A strong answer says" in said
    assert "To overrule" in said
    assert "put a minus before it" in interview.typed("b I have said it")
    assert "Kept" in interview.typed("a it was in my words")
    assert "a good answer makes" in interview.typed("")
    assert interview.report.headline.startswith("0 of 4 right")


def test_a_follow_up_that_was_not_heard_is_claimed_by_its_number_and_the_next_one_is_asked() -> None:
    interview = mock(5, seed=1)
    for _ in range(SPOKEN_EVERY - 1):
        interview.typed("?")
    turn = interview.interview.ask()
    assert turn
    assert turn.talk
    interview.typed(" ".join(turn.talk.source.points))
    while turn.talk.part is Part.MISSING:
        interview.typed(turn.talk.source.points[turn.talk.missing[0]])
    assert "the number of a follow-up" in interview.typed("as I said before")
    assert "Kept" in interview.typed("1 I did say that")
    assert f"Next: {turn.talk.source.ladder[1].question[:20]}" in interview.asked()


def test_where_no_widgets_are_drawn_it_says_how_to_go_on() -> None:
    interview = mock(5, seed=1)
    assert "fsdp-sim drill mock" in interview._repr_mimebundle_()["text/plain"]
