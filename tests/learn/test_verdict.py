"""`check` runs a learner's function apart from the notebook and answers wrong answers with their cause."""

import time

import pytest

from fsdp_sim.learn import check
from fsdp_sim.learn.start_here import CASES, USUAL, all_gathers_per_step

NAME = "all_gathers_per_step"


def right(layers: int, reshard_after_forward: bool | None) -> int:
    return layers + 1 + {True: layers + 1, None: layers, False: 0}[reshard_after_forward]


def test_the_right_answer_passes() -> None:
    verdict = check(NAME, right)
    assert verdict.passed, verdict


def test_the_truth_is_counted_in_the_program() -> None:
    assert [all_gathers_per_step(*case) for case in CASES] == [right(*case) for case in CASES]


@pytest.mark.parametrize("index", range(len(USUAL)))
def test_each_usual_mistake_is_wrong_and_is_answered_with_its_cause(index: int) -> None:
    formula, cause = USUAL[index]
    verdict = check(NAME, formula)
    assert not verdict.passed
    assert cause in verdict.message


def test_the_stub_is_told_to_begin() -> None:
    assert "returns nothing yet" in check(NAME, lambda layers, keep: ...).message


def test_another_wrong_answer_is_shown_beside_the_right_one() -> None:
    verdict = check(NAME, lambda layers, keep: right(layers, keep) + (layers == 12))
    assert "for 12 blocks and reshard_after_forward=None you say 26; torch issues 25" in verdict.message


def test_an_exception_in_the_solution_is_reported_not_raised() -> None:
    verdict = check(NAME, lambda layers, keep: {}[layers])
    assert not verdict.passed
    assert "raised KeyError" in verdict.message


def test_a_solution_that_does_not_end_is_stopped() -> None:
    def endless(layers: int, keep: bool | None) -> int:
        while True:
            time.sleep(0)

    verdict = check(NAME, endless, time_limit_s=1)
    assert "still running after 1 s" in verdict.message


def test_a_solution_that_takes_all_memory_hurts_only_itself() -> None:
    verdict = check(NAME, lambda layers, keep: len(bytearray(64 * 1024**3)))
    assert "raised MemoryError" in verdict.message


def test_wrong_calls_are_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'all_gathers_per_step'"):
        check("all_gather_per_step", right)
    with pytest.raises(TypeError, match="without calling it"):
        check(NAME, 11)  # type: ignore[arg-type]


def test_a_verdict_is_escaped_in_a_notebook() -> None:
    verdict = check(NAME, lambda layers, keep: "<b>")
    assert "&lt;b&gt;" in verdict._repr_html_()
