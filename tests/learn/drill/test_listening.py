"""The listener hears what was said: measured on answers that nobody used to make it, and on what says nothing."""

import tomllib
from pathlib import Path
from string import ascii_lowercase

import pytest

from fsdp_sim.learn.drill.listening import listen, listen_on, patterns
from fsdp_sim.learn.drill.listening.measured import Answers, Score, letters_heard, measure
from fsdp_sim.learn.drill.listening.pattern import pattern
from fsdp_sim.learn.drill.listening.words import MAX_LENGTH
from fsdp_sim.learn.drill.spoken import spoken

HERE = Path(__file__).parents[1] / "answers"
ENOUGH = 0.85


def answers(file: str) -> Answers:
    return tomllib.loads((HERE / file).read_text(encoding="utf-8"))


TUNED, HELD_OUT = answers("tuning.toml"), answers("held_out.toml")
NEVER_TUNED = sorted(set(HELD_OUT) - set(TUNED))
REST = {name: marked for name, marked in HELD_OUT.items() if name in TUNED}


def test_ten_questions_were_never_tuned_on_and_the_others_have_six_answers() -> None:
    assert len(NEVER_TUNED) == 10
    assert set(HELD_OUT) == set(spoken())
    assert min(len(marked) for marked in TUNED.values()) >= 6
    assert min(len(HELD_OUT[name]) for name in NEVER_TUNED) >= 6


@pytest.mark.parametrize("name", NEVER_TUNED)
def test_a_question_that_was_never_tuned_on_is_heard(name: str) -> None:
    score = measure({name: HELD_OUT[name]})[name]
    assert score.recall >= ENOUGH, score
    assert score.precision >= ENOUGH, score


def test_new_answers_to_the_others_are_heard() -> None:
    score = sum(measure(REST).values(), Score())
    assert score.recall >= ENOUGH, score
    assert score.precision >= ENOUGH, score


@pytest.mark.parametrize(
    ("file", "recall", "precision"),
    [
        ("follow_ups", ENOUGH, ENOUGH),
        ("follow_ups_hard", 0.8, 0.8),
        ("typed", ENOUGH, ENOUGH),
        ("typed_follow_ups", ENOUGH, ENOUGH),
        ("typed_later", ENOUGH, ENOUGH),
    ],
)
def test_answers_to_follow_ups_and_answers_as_they_are_typed_are_heard(
    file: str, recall: float, precision: float
) -> None:
    score = sum(measure(answers(f"{file}.toml")).values(), Score())
    assert score.recall >= recall, score
    assert score.precision >= precision, score


def test_a_strong_answer_to_a_follow_up_is_heard_and_its_question_is_none() -> None:
    rungs = [(name, place, rung) for name, entry in spoken().items() for place, rung in enumerate(entry.ladder)]
    assert [(name, place) for name, place, rung in rungs if not listen_on(name, place, rung.strong).made] == []
    assert [(name, place) for name, place, rung in rungs if listen_on(name, place, rung.question).made] == []


@pytest.mark.parametrize("said", ["324 all-reduces", "", "38 collectives", "FSDP1 and FSDP2", "a b c d e f g", "?!"])
def test_what_says_nothing_makes_no_point(said: str) -> None:
    for name in spoken():
        assert letters_heard(name, said) == set(), name


def test_the_question_is_no_answer_to_itself() -> None:
    echoed = {name: letters_heard(name, entry.question) for name, entry in spoken().items()}
    assert {name: heard for name, heard in echoed.items() if heard} == {}


def test_the_points_themselves_are_heard() -> None:
    score = Score()
    for name, entry in spoken().items():
        for letter, point in zip(ascii_lowercase, entry.points, strict=False):
            heard = letter in letters_heard(name, point)
            score += Score(heard, 0, not heard)
    assert score.recall >= ENOUGH, score


def test_an_answer_to_another_question_makes_few_points() -> None:
    """Some questions do share points; most do not."""
    made = possible = 0
    for name, entry in spoken().items():
        for other, marked in list(TUNED.items())[::4]:
            if spoken()[other].topic != entry.topic:
                made += len(letters_heard(name, marked[0][2]))
                possible += len(entry.points)
    assert made / possible < 0.07, made / possible


@pytest.mark.parametrize(
    ("said", "letters"),
    [
        ("FSDP2 has no flat parameter, each parameter is a DTensor.", "a"),
        ("FSDP2 has a flat parameter.", ""),
        ("FSDP1 has a flat parameter.", "a"),
        ("FSDP2 uses flat parameters and FSDP1 uses DTensors.", ""),
        ("FSDP2 doesn't call recordStream, its memory is determinstic.", "d"),
        ("FSDP2 needs recordStream.", ""),
    ],
)
def test_what_is_denied_is_not_what_is_said(said: str, letters: str) -> None:
    assert letters_heard("fsdp1_and_fsdp2", said) == set(letters)


@pytest.mark.parametrize(
    ("said", "made"),
    [
        ("Checkpoint each block, then compile it, then fully_shard.", True),
        ("Compile after checkpointing and before fully_shard.", True),
        ("fully_shard first, then compile, then checkpointing.", False),
        ("Before compiling you call fully_shard, and after that comes checkpointing.", False),
    ],
)
def test_the_order_is_heard(said: str, made: bool) -> None:
    assert ("a" in letters_heard("compile_and_checkpoint_order", said)) == made


def test_the_words_that_made_a_point_are_quoted_from_the_answer() -> None:
    said = "Well: the ACTIVATIONS aren\u2019t sharded. Each GPU has its own."
    quote = listen("what_is_not_sharded", said).made[0]
    assert said[quote.start : quote.end] == quote.text
    assert "ACTIVATIONS aren\u2019t sharded" in quote.text


@pytest.mark.parametrize(
    ("said", "heard"),
    [
        ("16 bytes per parameter", 1),
        ("15.8 bytes a param", 1),
        ("12 bytes", 0),
        ("12, no, 16 bytes per parameter", 1),
        ("not 12 but 16 bytes per parameter", 1),
        ("16, sorry, 12 bytes per parameter", 0),
        ("not 16 bytes per parameter", 0),
    ],
)
def test_a_number_is_heard_as_it_was_meant_to_a_twentieth(said: str, heard: bool) -> None:
    assert ("c" in letters_heard("fsdp_against_ddp", said)) == heard


@pytest.mark.parametrize(
    ("name", "said", "letters"),
    [
        ("fsdp_against_ddp", "1,5x the traffic", "e"),
        ("zero_stages", "1 = optimizer, 2 = + grads, 3 = + params", "a"),
        ("implicit_and_explicit", "its hook issues the gather before forward", "a"),
        ("implicit_and_explicit", "it issues an all-gather before forward", ""),
        ("not_layers_on_gpus", "All GPUs but one are idle.", "a"),
        ("fsdp1_and_fsdp2", "v2 is a function, v1 was a wrapper", "b"),
    ],
)
def test_answers_are_heard_as_they_are_typed(name: str, said: str, letters: str) -> None:
    assert letters_heard(name, said) == set(letters)


def test_an_answer_that_begins_by_denying_what_is_asked_is_wrong_whatever_words_follow() -> None:
    assert letters_heard("from_ddp_to_fully_shard 1", "Nothing, the loss stays right.") == {"1"}, "no error: so it is"
    assert letters_heard("full_or_sharded 2", "Nothing, DCP deletes the old files first and saves are atomic.") == set()
    assert letters_heard("fsdp_against_ddp 1", "Yes, the activations stay small.") == set()


def test_a_slip_of_the_keyboard_is_heard() -> None:
    assert letters_heard("what_is_not_sharded", "Actvations are not sharded.") == {"a"}


def test_what_is_long_is_read_to_its_limit_and_soon() -> None:
    said = "gather the parameters of a unit before forward and free them after, " * 2000
    assert listen("walk_through_a_step", said).made
    assert all(quote.end <= MAX_LENGTH for quote in listen("walk_through_a_step", said).made.values())


def test_a_line_that_could_never_be_heard_is_refused() -> None:
    with pytest.raises(ValueError, match="no word that could be heard"):
        pattern("gather .")
    assert set(patterns()) == set(spoken())
