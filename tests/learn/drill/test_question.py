"""How an answer is read and judged."""

import re

import pytest

from fsdp_sim.learn.drill.question import Choice, Mistake, Number, Order, UnreadableError

STATES = Number(
    text="How many bytes?",
    why="16 B x 8 billion / 16.",
    given={},
    answer=8e9,
    unit="bytes",
    mistakes=(Mistake(128e9, "that is without sharding"),),
)
HIDES = Number(text="How many tokens?", why="", given={}, answer=1100, unit="tokens", rel=0.05)
WHO = Choice(
    text="Who?",
    why="",
    given={},
    options=("rank 0", "rank 2", "nobody"),
    wrong={"rank 0": "it came", "nobody": "it hangs"},
)
STEP = Order(
    text="Order?",
    why="",
    given={},
    options=("forward", "all-gather", "free"),
    answer=("all-gather", "forward", "free"),
    because={"all-gather": "a unit computes with whole parameters"},
)


@pytest.mark.parametrize("typed", ["8 GB", "8e9 B", "7.45 GiB", "8,000 MB", " 8GB ", "8.1 GB"])
def test_a_quantity_may_be_written_in_any_unit_of_its_kind(typed: str) -> None:
    assert STATES.grade(typed).right


@pytest.mark.parametrize(
    "typed",
    [
        "about 8 GB",
        "~8 GB",
        "\u2248 8 GB",
        "8 gigabytes",
        "8 gb",
        "8 GB per GPU",
        "I'd say 8 GB each",
        "8 GB because 16 bytes x 8 billion / 16",
        "16 x 8e9 / 16 = 8 GB",
    ],
)
def test_a_quantity_may_be_said_as_people_say_it(typed: str) -> None:
    assert STATES.grade(typed).right


@pytest.mark.parametrize(
    "typed",
    [
        "4, no, 8 GB",
        "4 GB, I mean 8",
        "4 GB per GPU... wait, 8",
        "sorry, make that 8 GB",
        "not 4 but 8 GB",
        "12, no, 4, hmm, or rather 8 GB",
        "16 x 8e9 / 16 = 4 GB, no, 8 GB",
        "8 GB, not 4",
    ],
)
def test_a_number_that_is_taken_back_is_not_heard(typed: str) -> None:
    assert STATES.grade(typed).right


@pytest.mark.parametrize(
    ("typed", "heard"),
    [
        ("16 bytes times 8 billion over 16 ranks, that makes 8 GB", "8 GB"),
        ("each of the 16 ranks has 8 GB of states", "8 GB"),
        ("since there are 16 ranks it's 8 GB", "8 GB"),
        ("4 GB of gradients, no, 4 for the moments, so in all 8 GB I think", "8 GB"),
    ],
)
def test_of_an_answer_that_reckons_aloud_the_result_is_heard_and_said(typed: str, heard: str) -> None:
    reply = STATES.grade(typed)
    assert reply.right
    assert str(reply).startswith(f"✓ I heard {heard}. Right")


@pytest.mark.parametrize("typed", ["26 GB or 8 GB", "between 7 and 8 GB", "4 GB for weights, 8 GB", "so it is 8"])
def test_where_it_is_not_said_which_number_is_the_answer_it_is_asked_again(typed: str) -> None:
    with pytest.raises(UnreadableError, match="I hear"):
        STATES.grade(typed)


def test_what_is_denied_or_meant_no_more_is_not_the_answer() -> None:
    assert STATES.grade("8 GB, no 2 ranks keep the same").right
    assert not STATES.grade("8 GB, I mean 4").right
    with pytest.raises(UnreadableError):
        STATES.grade("not 8 GB")


@pytest.mark.parametrize(
    ("typed", "says"),
    [("8", "of what?"), ("~8", "of what?"), ("8 Gb", "another unit"), ("8 or 9 GB", "more than one number")],
)
def test_what_is_missing_in_a_quantity_is_said_truly(typed: str, says: str) -> None:
    with pytest.raises(UnreadableError, match=re.escape(says)):
        STATES.grade(typed)


@pytest.mark.parametrize(
    ("given", "unit", "text", "times", "says"),
    [
        ({"ranks": 8}, "bytes", "How many bytes?", 8, "the ranks of the question are 8"),
        ({"ranks": 16}, "bytes", "How many bytes?", 8, "as bits it would be right"),
        ({"ranks": 16}, "bytes", "How many bytes in bf16?", 2, "4 bytes for each element"),
        ({"ranks": 16}, "bytes", "How many bytes in fp32?", 0.5, "2 bytes for each element"),
        ({"nodes": 2}, "s", "How long?", 0.5, "the nodes of the question are 2"),
        ({}, "all-gathers", "How many all-gathers in a step?", 0.5, "forward and backward both count"),
        ({}, "s", "How long?", 2, "a factor of 2"),
    ],
)
def test_usual_factors_get_the_cause_that_is_likely_in_that_question(
    given: dict[str, int], unit: str, text: str, times: float, says: str
) -> None:
    asked = Number(text=text, why="", given=given, answer=6.0, unit=unit)
    assert says in asked.grade(f"{6 * times} {'B' if unit == 'bytes' else unit}").cause


def test_a_question_without_a_question_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="asks nothing"):
        Number(text="FSDP averages ", why="", given={}, answer=1, unit="tokens")


@pytest.mark.parametrize("typed", ["1.1k tokens", "1100", "1.1k", "1,130 tokens"])
def test_of_what_is_counted_the_unit_may_be_left_out(typed: str) -> None:
    assert HIDES.grade(typed).right


@pytest.mark.parametrize("typed", ["8", "8e9", "8 s", "8 GB/s", "many", "", "8 GB 4"])
def test_what_is_no_quantity_of_that_kind_is_asked_again(typed: str) -> None:
    with pytest.raises(UnreadableError):
        STATES.grade(typed)


def test_gigabytes_are_not_gibibytes() -> None:
    reply = STATES.grade("8 GiB")
    assert not reply.right


def test_a_usual_mistake_is_answered_with_its_cause() -> None:
    reply = STATES.grade("128 GB")
    assert not reply.right
    assert reply.cause == "that is without sharding"
    assert "Right is 8 GB" in str(reply)


def test_right_digits_with_another_unit_are_named() -> None:
    assert "MB" in STATES.grade("8 kB").cause or "unit" in STATES.grade("8 MB").cause


def test_a_choice_is_made_by_its_letter() -> None:
    assert WHO.grade("b").right
    assert WHO.grade("B)").right
    assert WHO.grade("c").cause == "it hangs"
    assert WHO.expected == "b) rank 2"
    for typed in ("d", "ab", "", "rank 2"):
        with pytest.raises(UnreadableError, match="a to c"):
            WHO.grade(typed)


def test_one_option_and_no_more_is_right() -> None:
    with pytest.raises(ValueError, match="2 are"):
        Choice(text="Which?", why="", given={}, options=("a", "b", "c"), wrong={"a": "no"})


@pytest.mark.parametrize("typed", ["b a c", "bac", "b, a, c", "B>A>C"])
def test_an_order_is_typed_as_letters(typed: str) -> None:
    assert STEP.grade(typed).right


def test_an_order_names_the_first_that_is_out_of_place_and_why() -> None:
    reply = STEP.grade("a b c")
    assert reply.cause == "place 1 is “all-gather”, not “forward”: a unit computes with whole parameters"
    with pytest.raises(UnreadableError, match="'a b' cannot be read: type each of the letters a to c once"):
        STEP.grade("a b")
    with pytest.raises(UnreadableError, match="Nothing was typed: type each of the letters"):
        STEP.grade(" ")
