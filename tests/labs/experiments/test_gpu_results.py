"""Recordings stand in for hardware that is not here, and every way to show one says so."""

import sys
from pathlib import Path

import pytest
import torch

from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
from labs.experiments import gpu_results as module
from labs.experiments.gpu_results import lab, main, names, on_gpus, record, recorded, result_of
from labs.experiments.result import LabResult, ResultRow, this_machine

ROOT = Path(__file__).parents[3]


def tiny(rows: int = 64) -> LabResult:
    """A lab: the bytes of a real matmul's output."""
    x = torch.ones(rows, rows)
    n_bytes = (x @ x).nbytes
    matmul = Event(
        seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="root", bytes=n_bytes, issue_s=0, start_s=0, end_s=1e-3
    )
    timeline = Timeline(Header(producer="mini", clock="measured", world_size=1), [matmul])
    row = ResultRow("matmul", "output", 4.0 * rows**2, float(n_bytes), "B")
    return LabResult("tiny", "measured", (row,), this_machine(), timelines={"measured": timeline}, notes=("float32",))


@pytest.fixture
def no_gpu(monkeypatch):
    def none():
        raise ValueError("torch 2.13.0+cpu is a build for CPU cores")

    monkeypatch.setattr(module, "gpus", none)


def test_what_was_recorded_comes_back_as_recorded(tmp_path):
    path = record("tiny", tiny, hardware="CPU cores", folder=tmp_path / "new")
    found = recorded("tiny", tmp_path / "new")

    assert path == tmp_path / "new" / "tiny.json.gz"
    assert found.kind == "recorded"
    assert "recorded elsewhere, not measured here" in found.caption
    assert (found.rows, found.hardware, found.date, found.notes) == (
        tiny().rows, this_machine(), tiny().date, ("float32",)
    )  # fmt: skip
    assert found.timelines["measured"].header == tiny().timelines["measured"].header
    assert set(found.versions) >= {"torch", "python"}
    assert list(found.timelines["measured"]) == list(tiny().timelines["measured"])


def test_nothing_recorded_is_nothing(tmp_path):
    assert recorded("tiny", tmp_path) is None


def test_only_what_ran_on_the_hardware_is_recorded(tmp_path):
    with pytest.raises(
        ValueError, match=r"tiny ran on 1 rank on .* CPU cores .*, not on NVIDIA H100; nothing was reco"
    ):
        record("tiny", tiny, hardware="NVIDIA H100", folder=tmp_path)
    path = record("tiny", tiny, hardware="CPU cores", folder=tmp_path)
    path.rename(tmp_path / "other.json.gz")
    with pytest.raises(ValueError, match="tiny returned a recording"):
        record("tiny", lambda: recorded("other", tmp_path), hardware="CPU cores", folder=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["other.json.gz"]


def test_elsewhere_its_recording_is_shown_and_says_so(tmp_path, no_gpu):
    record("tiny", tiny, hardware="CPU cores", folder=tmp_path)
    found = result_of("tiny", folder=tmp_path)

    assert found.kind == "recorded"
    assert found.rows[0].measured == 4 * 64 * 64
    reason = "No GPU is here (torch 2.13.0+cpu is a build for CPU cores)"
    assert found.notes[0].startswith(f"{reason}: this was recorded on {tiny().date} on {this_machine()}")
    assert found.notes[1:] == ("float32",)
    assert "No GPU is here" in found._repr_html_()


def test_where_none_was_made_it_says_so_and_shows_no_number(tmp_path, no_gpu):
    found = result_of("tiny", folder=tmp_path)

    assert (found.kind, found.rows) == ("recorded", ())
    assert "no recording of the lab 'tiny' on one has been made" in found.notes[0]
    assert "python -m labs.experiments.gpu_results tiny" in found._repr_html_()
    assert "nothing was measured" in found.caption


def test_every_recording_in_the_repository_is_of_a_gpu_and_can_be_read():
    for path in module.RECORDED.glob(f"*{module.SUFFIX}"):
        found = recorded(path.name.removesuffix(module.SUFFIX))
        assert found.rows
        assert "CPU cores" not in found.hardware


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Labs of its own: one, and a module that is none."""
    folder = tmp_path / "my_labs"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    tiny = "from tests.labs.experiments.test_gpu_results import tiny\n\n\n"
    (folder / "one.py").write_text(f"{tiny}def run(device: str = 'cpu') -> 'LabResult':\n    return tiny()\n")
    (folder / "cores.py").write_text(f"{tiny}def run() -> 'LabResult':\n    return tiny()\n")
    (folder / "none.py").write_text("def run() -> int:\n    return 1\n")
    (folder / "two").mkdir()
    (folder / "two" / "__init__.py").write_text("")
    (folder / "two" / "run_two.py").write_text((folder / "one.py").read_text())
    (folder / "helpers").mkdir()
    (folder / "helpers" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    import my_labs

    yield my_labs
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_labs"]:
        del sys.modules[name]


def test_a_lab_is_a_module_whose_run_returns_a_result(package):
    assert names(package) == ("cores", "one", "two")
    assert on_gpus(package) == ("one", "two")
    assert {lab(name, package)().lab for name in names(package)} == {"tiny"}
    with pytest.raises(ValueError, match="no lab is called 'onee'; did you mean 'one'"):
        lab("onee", package)
    with pytest.raises(ValueError, match="no lab is called 'none'"):
        lab("none", package)


def test_all_ten_labs_are_found():
    """By the names of their notebooks. The eleventh runs what the learner chose, which nobody can have recorded."""
    masters = (ROOT / "notebooks" / "masters").glob("lab_*.py")
    notebooks = sorted(path.stem for path in masters if path.stem != "lab_11_capstone")
    assert sorted(names()) == sorted(stem.split("_", 2)[2] for stem in notebooks)
    assert len(notebooks) == 10


def test_without_a_gpu_the_command_records_nothing(tmp_path, no_gpu, capsys):
    assert main([f"--out={tmp_path}"]) == 2
    assert "torch 2.13.0+cpu is a build for CPU cores" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("hardware", "status", "files"), [("CPU cores", 0, ["one.json.gz"]), ("NVIDIA H100", 1, [])])
def test_the_command_records_each_lab_and_says_which_failed(
    package, tmp_path, monkeypatch, capsys, hardware, status, files
):
    monkeypatch.setattr(module, "gpus", lambda: [hardware])
    monkeypatch.setattr(module, "on_gpus", lambda: ("one",))
    monkeypatch.setattr(module, "lab", lambda name: lab(name, package))

    assert main([f"--out={tmp_path / 'out'}"]) == status
    assert "one: " in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").glob("*")] == files


def test_an_unknown_lab_is_one_sentence(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(module, "gpus", lambda: ["NVIDIA H100"])
    monkeypatch.setattr(module, "names", lambda package=None: ("memory",))

    assert main(["memori", f"--out={tmp_path}"]) == 2
    assert "no lab is called 'memori'; did you mean 'memory'?" in capsys.readouterr().out


def test_a_lab_about_cpu_cores_is_not_recorded(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(module, "gpus", lambda: ["NVIDIA H100"])

    assert main(["units", f"--out={tmp_path}"]) == 2
    assert "the lab 'units' is about CPU cores and runs everywhere" in capsys.readouterr().out


@pytest.mark.tail
def test_what_keeps_a_lab_from_running_on_a_gpu_that_is_here_is_said(monkeypatch, tmp_path):
    """The GPU is there to be seen by this process alone: the lab's own finds none."""
    monkeypatch.setattr(module, "gpus", lambda: ["NVIDIA H100"])
    found = result_of("numerics", folder=tmp_path)

    assert found.rows == ()
    assert found.notes[0].startswith(
        "The lab did not run on the GPU that is here (labs.experiments.gpu_results: torch "
    )


def test_every_notebook_of_a_lab_asks_for_gpus_where_the_lab_can_use_them():
    asking = {p.stem.split("_", 2)[2] for p in (ROOT / "notebooks" / "masters").glob("lab_*.py")
              if "result_of(" in p.read_text()}  # fmt: skip

    assert asking == set(on_gpus()) == {"compile", "ddp_to_fsdp2", "memory", "numerics", "overlap", "resume", "tune"}
