"""The learner's file beside torch's `fully_shard`: on the ladder, and under torchrun, saved and resumed."""

from datetime import date
from pathlib import Path

import pytest

from fsdp_sim.learn import mine as own
from fsdp_sim.learn import progress
from labs.cluster.torchrun import FailedError, launch
from labs.experiments.mine import mine

pytestmark = pytest.mark.usefixtures("right_rungs_once")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / own.FILE
    monkeypatch.setenv(own.VARIABLE, str(path))
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "progress.json"))
    return path


def test_before_any_answer_it_is_the_reference_and_trains_as_torch(file: Path) -> None:
    found = mine()

    assert found.as_torch
    assert "it begins with the first part that is accepted): 0 of 9 parts are yours" in found.headline
    assert [cells[2] for cells in found.costs] == ["–", "–", "every bit", "every bit"]
    exposed = [cells[4] for cells in found.costs if cells[0] in ("torch FSDP2", "yours, my_fsdp.py")]
    assert [f"{ms} of it" in found.picture.finding for ms in exposed] == [True, True], "as the picture says it"
    assert {event.unit for event in found.timelines["yours"] if event.rank == 0} >= {"root", "layers.0", "layers.3"}
    assert mine(climb_it=False).headline.endswith(f"It trained as torch's fully_shard, bit for bit, on {date.today()}")


def test_the_day_on_which_it_trained_as_torch_stays_and_a_change_since_is_said(file: Path) -> None:
    file.write_text(own.begun())
    assert "It trained" not in mine(climb_it=False).headline
    for day in ("2026-11-27", "2026-11-28"):
        progress.keep_climb(progress.Climb(own.digest_of(own.begun()), day))
    assert mine(climb_it=False).headline.endswith("bit for bit, on 2026-11-27")

    file.write_text(own.begun().replace("ReduceOp.AVG", "ReduceOp.SUM"))

    assert mine(climb_it=False).headline.endswith("on 2026-11-27, and has changed since: climb again")


def test_a_file_that_sums_where_it_should_average_is_said_not_to_be_torchs(file: Path) -> None:
    file.write_text(own.begun().replace("ReduceOp.AVG", "ReduceOp.SUM"))

    found = mine()

    assert not found.as_torch
    assert "It does not train as torch's fully_shard" in found.headline
    assert "gradient" in found.headline


def test_a_file_that_cannot_train_says_why_and_a_notebook_goes_on(file: Path) -> None:
    file.write_text(
        own.begun().replace("        unit.wait()\n        return unit.on_inputs", "        return unit.on_inputs")
    )

    found = mine()

    assert not found.as_torch
    assert "It does not train: " in found.headline
    assert "mixed torch.Tensor and DTensor" in found.headline
    assert found.picture is None


def test_its_parts_are_told_without_training(file: Path) -> None:
    own.put("prefetch", "def prefetch(unit):\n    pass")

    found = mine(climb_it=False)

    assert ("05", "prefetch", "yours, accepted") in found.rows
    assert ("04", "put_hooks", "the reference; you skipped this step") in found.rows
    assert found.headline.startswith("my_fsdp.py: 1 of 9 parts are yours")


@pytest.mark.usefixtures("warm_torchrun")
def test_torchrun_trains_saves_and_resumes_it(file: Path) -> None:
    file.write_text(own.begun())
    said = launch("-m", "labs.experiments.mine", str(file), ranks=2)
    assert "saved after 3 of 6 steps and resumed: equal bit for bit" in said

    file.write_text(own.begun().replace("        padded[: len(own)] = own\n        whole = own", "        whole = own"))
    with pytest.raises(FailedError):
        launch("-m", "labs.experiments.mine", str(file), ranks=2)
