"""An exercise against the clock."""

import pytest

from fsdp_sim.learn.drill import whiteboard as start
from fsdp_sim.learn.drill.whiteboard import Whiteboard
from fsdp_sim.learn.find import load
from fsdp_sim.learn.verdict import Grade, Use, Verdict

NAME = "case_14"


@pytest.mark.parametrize(
    ("grade", "used", "says"),
    [
        (Grade.PASS, 0.5, "In time"),
        (Grade.OPTIMAL, 1.5, "Over time"),
        (Grade.NOT_YET, 0.5, "Go on"),
        (Grade.NOT_YET, 1.5, "Time is up"),
    ],
)
def test_it_says_how_much_of_the_time_was_used(grade: Grade, used: float, says: str) -> None:
    now_s = 100.0
    exercise = load(NAME)
    clock = Whiteboard(exercise, lambda: now_s)
    now_s += used * 60 * exercise.minutes
    said = clock.stop(Verdict(NAME, grade, "", Use(exercise.reference, "the reference solution of")))
    assert says in said
    assert f"of {exercise.minutes} minutes" in said


def test_it_says_what_is_asked_and_how_long_one_has() -> None:
    shown = start(NAME)
    assert load(NAME).title in repr(shown)
    assert f"{load(NAME).minutes} minutes" in shown._repr_html_()


def test_an_unknown_exercise_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=NAME):
        start(f"{NAME}1")
