"""Faults happen where, when and to whom they are asked for, and nowhere else."""

import pytest

from labs.loop.failpoints import VARIABLE, failpoint


@pytest.fixture
def faults(monkeypatch):
    return lambda text: monkeypatch.setenv(VARIABLE, text)


def test_without_the_variable_nothing_happens(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert failpoint("loss", 3) == ""


def test_only_at_the_point_step_and_rank_that_are_named(faults, monkeypatch):
    faults("nan:loss@3@1")
    monkeypatch.setenv("RANK", "0")
    assert failpoint("loss", 3) == ""
    monkeypatch.setenv("RANK", "1")
    assert failpoint("loss", 2) == ""
    assert failpoint("other", 3) == ""
    assert failpoint("loss", 3) == "nan"


def test_a_star_stands_for_any(faults):
    faults("nan:loss@*")
    assert {failpoint("loss", step) for step in range(3)} == {"nan"}


def test_only_in_the_first_attempt(faults, monkeypatch):
    faults("raise:loader")
    with pytest.raises(RuntimeError, match="raise:loader"):
        failpoint("loader", 0)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert failpoint("loader", 0) == ""


def test_an_unknown_fault_is_named(faults):
    faults("explode:loss@1")
    with pytest.raises(ValueError, match="explode:loss@1"):
        failpoint("loss", 1)
