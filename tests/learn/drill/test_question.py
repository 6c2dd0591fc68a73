"""How an answer is read and judged."""

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
        Choice(text="", why="", given={}, options=("a", "b", "c"), wrong={"a": "no"})


@pytest.mark.parametrize("typed", ["b a c", "bac", "b, a, c", "B>A>C"])
def test_an_order_is_typed_as_letters(typed: str) -> None:
    assert STEP.grade(typed).right


def test_an_order_names_the_first_that_is_out_of_place_and_why() -> None:
    reply = STEP.grade("a b c")
    assert reply.cause == "place 1 is “all-gather”, not “forward”: a unit computes with whole parameters"
    with pytest.raises(UnreadableError, match="3 different letters"):
        STEP.grade("a b")
