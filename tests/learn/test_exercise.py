"""An exercise that is not as a learner may expect is refused where it is built, with its name and the fault."""

from __future__ import annotations

import textwrap
from dataclasses import replace
from typing import Any

import pytest

from fsdp_sim.learn.exercise import Wrong, mutant
from fsdp_sim.learn.find import load

NAME = "all_gathers_per_step"
RIGHT = load(NAME)


def more_arguments(layers: int, reshard_after_forward: bool | None, prefetch: int) -> Any:
    return ...


@pytest.mark.parametrize(
    ("field", "value", "fault"),
    [
        ("title", "count the all-gathers", "should begin with a capital letter"),
        ("title", "Count the all-gathers.", "end without a full stop"),
        ("difficulty", 6, "its difficulty is 6; it goes from 1 to 5"),
        ("importance", 0, "its importance is 0; it goes from 1 to 5"),
        ("minutes", 240, "it takes 240 minutes; one can plan with 3 to 90"),
        ("contract", "Count.", "its contract should be one paragraph of more than 80 characters: 'Count.'"),
        ("why", "Because.\n" * 20, "its why should be one paragraph"),
        ("covers", (), "it covers (); rows are written as 'coverage 000.10'"),
        ("covers", ("coverage 10",), "it covers ('coverage 10',); rows are written as"),
        ("wrong", (), "it needs at least one wrong answer and one shortcut"),
        ("shortcuts", (), "it needs at least one wrong answer and one shortcut"),
        ("wrong", (Wrong(more_arguments, "no"),), "the message 'no' to a wrong answer says too little"),
        ("hints", ("Look again at the units.",) * 3, "it needs three different hints, and has 1"),
        ("hints", ("Count.", *RIGHT.hints[1:]), "a hint should be one paragraph of 20 to 300 characters: 'Count.'"),
        ("stub", more_arguments, "its stub takes (layers, reshard_after_forward, prefetch) and its solution (layers,"),
        ("wrong", (mutant({"2 * layers": "layers"}, "too few of them"),), f"'2 * layers' stands 0 times in {NAME}"),
        ("wrong", (mutant({"layers": "units"}, "too few of them"),), f"'layers' stands 4 times in {NAME}"),
        ("wrong", (mutant({"forward + backward": "("}, "too few of them"),), "is no Python: '(' was never closed"),
    ],
)
def test_a_fault_is_named(field: str, value: object, fault: str) -> None:
    with pytest.raises(ValueError, match=f"^exercise {NAME}: ") as refused:
        replace(RIGHT, **{field: value})
    assert fault in str(refused.value)


def test_a_hint_may_not_be_the_solution() -> None:
    with pytest.raises(ValueError, match=rf"^exercise {NAME}: a hint gives the whole solution away"):
        replace(
            RIGHT,
            hints=(
                *RIGHT.hints[:2],
                "forward = layers + 1 backward = {True: layers + 1, None: layers, False: 0}[reshard_after_forward] "
                "return forward + backward",
            ),
        )


def test_a_solution_is_read_at_once() -> None:
    with pytest.raises(ValueError, match=r"its solution has \d+ lines; at most 30 can be read at once"):
        replace(RIGHT, reference=textwrap.TextWrapper._wrap_chunks)


def test_a_stub_that_is_not_written_is_the_first_line_of_the_solution() -> None:
    assert RIGHT.stub(4, None) is ...
    with pytest.raises(TypeError):
        RIGHT.stub(4)
