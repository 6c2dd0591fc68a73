"""A hunt's fault is drawn, really run, noticed by the judge; the sound training passes, and no shortcut does."""

from __future__ import annotations

import gc
import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch._C._distributed_c10d as c10d

from fsdp_sim.learn import apart, board, predict, progress
from fsdp_sim.learn.apart import StoppedError, Trial, TrialRun, carry_out
from fsdp_sim.learn.edit import made, source_of
from fsdp_sim.learn.hunts import TRAININGS, Fault, drawn, hand_in, hunt, hunting
from fsdp_sim.learn.hunts.evidence import Evidence, left_by
from fsdp_sim.learn.hunts.hunting import given, question
from fsdp_sim.learn.hunts.on_rank import alone
from labs.cluster.flight_recorder import diagnose, read

NUMBERS = range(1, len(TRAININGS) + 1)
SOUND = [pytest.param(n, id=TRAININGS[n - 1].sound.__name__) for n in NUMBERS]
FAULTS = [pytest.param(n, fault, id=fault.cause) for n in NUMBERS for fault in TRAININGS[n - 1].faults]
HANG, MEMORY, SLOW, RESUME, BESIDE_ONE = range(4, 9)
DUMPS = pytest.mark.skipif(
    not hasattr(c10d, "_dump_fr_trace_json"), reason="needs torch 2.13: gloo's dumps are written as JSON there"
)


def handed_in(source: str) -> Callable[[int], Any]:
    """The function of a source, as a cell of a notebook has it."""
    name = source.partition("def ")[2].partition("(")[0]
    function = made(name, source, f"a cell, {hash(source)}", {"__name__": "__main__"})
    assert callable(function)
    return function


@pytest.fixture(autouse=True)
def sound_once(monkeypatch: pytest.MonkeyPatch, kept: dict[object, TrialRun] = {}) -> None:  # noqa: B006
    """Sound trainings run once for all that is compared with them on one seed."""

    def carried_out(trial: Trial, function: Callable[..., Any]) -> TrialRun:
        if function not in [of.sound for of in TRAININGS]:
            return carry_out(trial, function)
        key = function, str(trial.each)
        kept[key] = kept.get(key) or carry_out(trial, function)
        return kept[key]

    monkeypatch.setattr(hunting, "carry_out", carried_out)


@pytest.mark.slow
@pytest.mark.parametrize("number", SOUND)
def test_the_sound_training_passes(number: int) -> None:
    verdict = hand_in(number, handed_in(source_of(TRAININGS[number - 1].sound)), seed=3)

    assert verdict.passed, verdict
    assert f'What was the cause? Say it with `predict("hunt_{number}")`.' in verdict.message


@pytest.mark.tail
@pytest.mark.parametrize(("number", "fault"), FAULTS)
def test_every_fault_is_noticed(number: int, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "TIMEOUT_S", 1.0)  # some of them hang

    verdict = hand_in(number, handed_in(TRAININGS[number - 1].faulty(fault).source), seed=3)

    assert not verdict.passed
    assert fault.cause not in verdict.message
    assert "cannot be" not in verdict.message
    assert "Error" not in verdict.message, "it is a fault, no typing error"


@pytest.mark.slow
def test_the_training_as_it_was_given_gets_its_symptom_and_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SIM_SEED", "0")

    verdict = hand_in(1, handed_in("# read it again\n" + given(1)), seed=3)

    assert "expected" in verdict.message
    assert 'Say it with `predict("hunt_1")`' in verdict.message
    assert drawn(1).cause not in verdict.message
    assert progress.entry("hunt_1") == progress.ExerciseEntry(), "to run all cells is no try"


def canned(seed: int) -> dict[str, Any]:
    return {"losses": [1.0, 1.0, 1.0, 1.0], "norms": [0.1, 0.1, 0.1, 0.1], "weights": None}


def by_reference(seed: int) -> Any:
    return TRAININGS[0].sound(seed)


def past_the_finders(seed: int) -> Any:
    """Takes away whatever refuses an import."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "frozen" in str(finder) or isinstance(finder, type)]
    return importlib.import_module("fsdp_sim.learn.hunts.trainings").trains(seed)


def by_copying(seed: int) -> Any:
    """Reads the sound training where it stands."""
    names: dict[str, Any] = {}
    text = Path(importlib.import_module("fsdp_sim").__file__ or "").with_name("learn") / "hunts" / "trainings.py"
    exec("def trains" + text.read_text().partition("def trains")[2].partition("def runs")[0], names)
    return names["trains"](seed)


def from_memory(seed: int) -> Any:
    """Looks for the sound training among all objects that there still are."""
    functions = [one for one in gc.get_objects() if getattr(one, "__name__", "") == "trains" and callable(one)]
    return functions[0](seed)


def by_another_process(seed: int) -> Any:
    return subprocess.run([sys.executable, "-c", "import fsdp_sim.learn"], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cheat", "says"),
    [
        (canned, "expected"),
        (by_reference, r"fsdp_sim\.learn\S* is not there"),
        (past_the_finders, r"fsdp_sim\.learn\S* is not there"),
        (by_copying, "fsdp_sim.learn is not there"),
        (from_memory, "list index out of range"),
        (by_another_process, "starts no process"),
    ],
)
def test_a_shortcut_does_not_pass(cheat: Callable[[int], Any], says: str) -> None:
    verdict = hand_in(1, by_value(cheat), seed=3)

    assert not verdict.passed
    assert re.search(says, verdict.message)
    assert "Hunts: 0 of 8 mended (1 not yet in 1 try)." in str(board())


def faulty_in(number: int, fault: int, edits: dict[str, str]) -> Callable[[int], Any]:
    """A training with a fault, in which somebody has hidden it."""
    source = TRAININGS[number - 1].faulty(TRAININGS[number - 1].faults[fault]).source
    for text, other in edits.items():
        assert text in source
        source = source.replace(text, other)
    return handed_in(source)


@pytest.mark.slow
def test_memory_is_not_hidden_from_the_meter() -> None:
    verdict = hand_in(MEMORY, faulty_in(MEMORY, 5, {
        "    torch.manual_seed(seed)\n": "    from torch.utils._python_dispatch import _disable_current_modes\n"
        "    modes = _disable_current_modes()\n    modes.__enter__()\n    torch.manual_seed(seed)\n",
    }), seed=3)  # fmt: skip

    assert "does something hide its tensors?" in verdict.message


@pytest.mark.slow
def test_an_all_gather_is_not_hidden_behind_computing_that_there_was_not() -> None:
    verdict = hand_in(SLOW, faulty_in(SLOW, 1, {
        "unshard()": "unshard(async_op=True); from fsdp_sim.timeline import RECORDER, Op; "
        "RECORDER.end(RECORDER.begin(Op.FWD, 'blocks.9'))",
    }), seed=3)  # fmt: skip

    assert "times that a unit computes" in verdict.message


def by_value(function: Any) -> Any:
    """As a notebook's functions are sent: with what they use, and not as a name of a module that ranks can import."""
    function.__module__ = "__main__"
    return function


def what_it_can_import(seed: int) -> list[str]:
    """Which ways to the sound training there are: in a helper, too."""
    name = ".".join(["fsdp_sim", "learn", "hunts", "trainings"])

    def helper() -> Any:
        from fsdp_sim.learn.hunts import trainings

        return trainings

    ways = {
        "in a helper": helper,
        "__import__": lambda: __import__(name),
        "importlib": lambda: importlib.import_module(name),
        "exec": lambda: exec(f"import {name}"),
        "sys.modules": lambda: sys.modules[name],
        "an attribute": lambda: vars(__import__("fsdp_sim"))["learn"],
        "the ranks' own": lambda: importlib.import_module("fsdp_sim.ranks"),
    }
    found = []
    for way, go in ways.items():
        try:
            go()
            found.append(way)
        except (ImportError, PermissionError, KeyError):
            pass
    return found


@pytest.mark.slow
def test_a_training_that_is_handed_in_runs_where_the_course_is_not() -> None:
    trial = Trial((((0,),),))

    assert carry_out(trial, by_value(what_it_can_import)).answers[0][0][0] == "in a helper"
    assert carry_out(trial, alone(by_value(what_it_can_import))).answers == [[["the ranks' own"]]]
    with pytest.raises(StoppedError, match=r"fsdp_sim\.learn\S* is not there for a training that is handed in"):
        carry_out(trial, alone(by_value(by_reference)))


def test_learners_get_different_faults_and_each_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in NUMBERS:
        got = []
        for seed in range(12):
            monkeypatch.setenv("FSDP_SIM_SEED", str(seed))
            got.append(drawn(number).cause)
            assert drawn(number).cause == got[-1]
        assert len(set(got)) >= 3


def test_the_cause_is_one_of_five_and_is_asked_for_before_it_is_told() -> None:
    for number in NUMBERS:
        asked = question(number)
        assert len(asked.choices) == 5
        assert [c for c in asked.choices if asked.commit(c).right] == [drawn(number).cause]
    assert predict("hunt_1", drawn(1).cause)


def test_a_fault_is_an_edit_that_leaves_python() -> None:
    for training in TRAININGS:
        sources = [source_of(training.sound), *(training.faulty(fault).source for fault in training.faults)]
        assert len(set(sources)) == len(sources)


@pytest.mark.slow
def test_a_hunt_shows_the_source_as_drawn_and_what_the_run_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_SIM_SEED", "0")
    shown = hunt(1)
    assert "def hunt_1(seed)" in shown.source
    assert any(line.startswith("planned: rank 1: losses") for line in shown.left)
    assert drawn(1).cause not in str(shown)


@DUMPS
@pytest.mark.slow
def test_a_hang_leaves_dumps_that_say_who_waits_in_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that prints issues an all-reduce where the others issue an all-gather."""
    reduces_alone = TRAININGS[HANG - 1].faults[2]
    monkeypatch.setattr(hunting, "drawn", lambda number: reduces_alone)

    (finding,) = diagnose(read(hunt(HANG).save(tmp_path)))

    assert (finding.missing, finding.waiting) == ((0,), (1, 2))
    assert finding.mismatch.startswith("all-reduce of 1 element")
    assert finding.kind == "all-gather"


@DUMPS
@pytest.mark.tail
@pytest.mark.parametrize("fault", TRAININGS[HANG - 1].faults, ids=lambda fault: fault.cause)
def test_every_hang_is_one_for_gloo_too(fault: Fault) -> None:
    of = TRAININGS[HANG - 1]
    left = left_by(of, of.faulty(fault), 0)
    assert len(left.files) == of.ranks
    assert all("waits in #" in line for line in left.lines[: of.ranks])


@pytest.mark.tail
def test_memory_that_grows_is_seen_at_the_end_of_every_step() -> None:
    of = TRAININGS[MEMORY - 1]
    (picture,) = left_by(of, of.faulty(of.faults[0]), 0).pictures
    grows, _, planned = ([float(cell.rpartition(" then ")[2].split()[0]) for cell in row[1:]] for row in rows(picture))
    assert grows == sorted(set(grows))
    assert grows[-1] > 2 * planned[-1]


@pytest.mark.tail
def test_a_step_that_is_too_long_leaves_a_timeline_with_what_computes_and_what_travels() -> None:
    of = TRAININGS[SLOW - 1]
    (picture,) = left_by(of, of.faulty(of.faults[0]), 0).pictures
    names = {trace.name for trace in picture.figure.data if trace.name}
    assert {"forward", "backward", "all-gather", "reduce-scatter"} <= names


@pytest.mark.tail
def test_losses_after_a_resume_are_drawn_beside_the_unbroken_ones() -> None:
    of = TRAININGS[RESUME - 1]
    (picture,) = left_by(of, of.faulty(of.faults[2]), 0).pictures
    same = [unbroken == resumed for _, unbroken, resumed in rows(picture)]
    assert same == [True] * 3 + [False] * 3


@pytest.mark.tail
def test_numbers_are_drawn_beside_those_of_one_process() -> None:
    of = TRAININGS[BESIDE_ONE - 1]
    losses, norms = left_by(of, of.faulty(of.faults[1]), 0).pictures
    assert [float(found) > 500 * float(one) for _, one, found in rows(norms)] == [True] * 4
    _, one, found = rows(losses)[0]
    assert one == found


@pytest.mark.parametrize("shows", [True, False])
def test_a_picture_that_says_what_the_lines_say_is_drawn_when_asked_for(
    shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: seen.append("text"))
    picture: Any = SimpleNamespace(show=lambda: seen.append("picture"), finding="The losses part.")
    left = Evidence("Hunt 7", "def hunt_7(seed): ...", ("found: 1.0, 0.9",), (picture,), shows=shows)

    left._ipython_display_()
    assert seen == ["text"] + ["picture"] * shows
    assert ("The losses part." in str(left)) == shows

    left.draw()
    assert seen[-1] == "picture"


def rows(picture: Any) -> Any:
    return picture.tables[0].rows


def test_a_hunt_goes_through_30_to_80_lines() -> None:
    assert all(30 <= len(source_of(of.sound).splitlines()) <= 80 for of in TRAININGS)


def test_there_is_no_other_hunt() -> None:
    with pytest.raises(ValueError, match="there are 1 to"):
        hunt(99)
