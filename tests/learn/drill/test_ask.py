"""One question in a notebook, answered there; a spoken one with its folded answer."""

import pytest

from fsdp_sim.learn.drill import ask, record, spoken
from fsdp_sim.learn.drill.template import TOPICS, templates


def test_a_question_by_name_is_answered_and_kept() -> None:
    question = ask("states_of_a_rank", seed=1)
    assert question.question.text in str(question)
    assert "60 seconds" in str(question)
    assert not question.answer("3 kB").right
    assert question.answer(question.question.expected).right
    kept = record.read()["states_of_a_rank"]
    assert (kept.times, kept.right) == (2, 1)


def test_options_are_shown_with_their_letters() -> None:
    order = ask("issued_in_backward", seed=1)
    assert all(option in order._repr_html_() for option in order.question.lettered)
    assert order.question.lettered[0].startswith("a) ")


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_asks_of_that_topic(topic: str) -> None:
    assert ask(topic, seed=1).template.topic == topic


def test_without_a_name_anything_may_come_and_numbers_are_drawn_anew() -> None:
    assert ask().template.name in templates()
    assert len({str(ask("states_of_a_rank")) for _ in range(20)}) > 3


def test_what_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"'nccl'.*memory"):
        ask("nccl")
    with pytest.raises(ValueError, match="walk_through_a_step"):
        spoken("walk_through_a_stp")


def test_a_reply_is_shown_with_a_sign_and_text_is_escaped() -> None:
    reply = ask("states_of_a_rank", seed=1).answer("3 kB")
    assert "✗" in reply._repr_html_()
    assert 'role="status"' in reply._repr_html_()


def test_a_spoken_question_folds_its_answer() -> None:
    shown = spoken("walk_through_a_step")
    assert shown._repr_html_().count("<details>") >= 4
    assert shown.source.points[0] in str(shown)
    assert shown.source.example(0) in str(shown)


def test_a_spoken_question_listens_quotes_asks_on_and_may_be_overruled() -> None:
    question = spoken("walk_through_a_step")
    reply = question.answer("First, the parameters of a unit are all-gathered before its forward.")
    assert "_unit are all-gathered before its forward_" in str(reply)
    assert "<u><b>" in reply._repr_html_()
    assert "What is missing: Who computes what" in str(reply)
    while not reply.over:
        reply = question.answer("no idea")
    assert "✗ 2 of 7 points: a good answer makes 5" in str(reply)
    reply = question.overrule("c", "I called it dropped")
    assert "You claim it: I called it dropped" in str(reply)
    assert record.read()["walk_through_a_step"].overruled == {"c": "I called it dropped"}


def test_a_spoken_question_is_a_box_where_widgets_are_drawn_and_text_elsewhere() -> None:
    shown = spoken("walk_through_a_step")
    bundle = shown._repr_mimebundle_()
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= set(bundle)
    _, box, replied, claim = shown._widget().children
    box.value = "The optimizer steps the local shards without communication."
    box._submission_callbacks(box)
    assert "1 point made" in replied.value
    assert claim.layout.display == "none", "until all was asked"
    while shown.talk.asks:
        box.value = "no idea"
        box._submission_callbacks(box)
    assert claim.layout.display == ""
    which, why = claim.children[1].children
    which.value, why.value = "c", "it was dropped"
    why._submission_callbacks(why)
    assert "You claim it: it was dropped" in replied.value
    assert "c" not in which.options


@pytest.mark.parametrize("card", ["{}", '{"due": 5}', '{"due": "2026-01-01"}'], ids=["empty", "a number", "no zone"])
def test_a_forged_record_is_put_aside(card: str) -> None:
    record.file().parent.mkdir(exist_ok=True)
    record.file().write_text(f'{{"questions": {{"states_of_a_rank": {{"times": 1, "right": 1, "card": {card}}}}}}}')
    assert record.due(["states_of_a_rank"]) == []
    assert "was damaged" in record.note("states_of_a_rank", right=True, took_s=1, given_s=60)
