"""A hunt's fault is drawn, really run, noticed by the judge; the sound training passes, and no shortcut does."""

from __future__ import annotations

import pytest

from fsdp_sim.learn import predict
from fsdp_sim.learn.hunts import TRAININGS, drawn, hand_in, hunt
from fsdp_sim.learn.hunts.hunting import question

SOUND = [pytest.param(n, id=of.sound.__name__) for n, of in enumerate(TRAININGS, 1)]
FAULTS = [pytest.param(n, f, id=f.cause) for n, of in enumerate(TRAININGS, 1) for f in of.faults]


@pytest.mark.slow
@pytest.mark.parametrize("number", SOUND)
def test_the_sound_training_passes(number: int) -> None:
    verdict = hand_in(number, TRAININGS[number - 1].sound, seed=3)

    assert verdict.passed, verdict
    assert f"The cause was: {drawn(number).cause}" in verdict.message


@pytest.mark.tail
@pytest.mark.parametrize(("number", "fault"), FAULTS)
def test_every_fault_is_noticed(number: int, fault: object) -> None:
    of = TRAININGS[number - 1]

    verdict = hand_in(number, of.faulty(fault), seed=3)  # type: ignore[arg-type]

    assert not verdict.passed
    assert "cannot be" not in verdict.message
    assert "Error" not in verdict.message, "it is a fault, no typing error"


def canned(seed):
    return {"losses": [1.0, 1.0, 1.0, 1.0], "norms": [0.1, 0.1, 0.1, 0.1], "weights": None}


def by_import(seed):
    from fsdp_sim.learn.hunts import TRAININGS

    return TRAININGS[0].sound(seed)


@pytest.mark.slow
@pytest.mark.parametrize(("cheat", "says"), [(canned, "expected"), (by_import, "it uses fsdp_sim")])
def test_a_shortcut_does_not_pass(cheat, says) -> None:
    verdict = hand_in(1, cheat, seed=3)

    assert not verdict.passed
    assert says in verdict.message


def test_learners_get_different_faults_and_each_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    got = []
    for seed in range(12):
        monkeypatch.setenv("FSDP_SIM_SEED", str(seed))
        got.append(drawn(1).cause)
        assert drawn(1).cause == got[-1]
    assert len(set(got)) > 3


def test_the_cause_is_one_of_the_catalogue_and_is_asked_for_before_it_is_told() -> None:
    for number, of in enumerate(TRAININGS, 1):
        asked = question(number)
        assert set(asked.choices) == {fault.cause for fault in of.faults}
        assert [c for c in asked.choices if asked.commit(c).right] == [drawn(number).cause]
    assert predict("hunt_1", drawn(1).cause)


@pytest.mark.slow
def test_a_hunt_shows_the_source_as_drawn_and_what_the_run_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SIM_SEED", "0")
    shown = hunt(1)
    assert "def hunt_1(seed)" in shown.source
    assert any(line.startswith("planned: rank 1: losses") for line in shown.left)
    assert drawn(1).cause not in str(shown)


def test_there_is_no_other_hunt() -> None:
    with pytest.raises(ValueError, match="there are 1 to"):
        hunt(99)
