"""`make gpu-day` as whoever has a GPU for an hour meets it; on CPU cores, which is its rehearsal."""

import gzip
import io
import json
import socket
import sys
import zipfile
from pathlib import Path

import pytest
from rich.console import Console

from labs.experiments.result import LabResult, ResultRow
from labs.gpu_day import bundle
from labs.gpu_day.__main__ import main
from labs.gpu_day.day import GpuDay, PartState, spent
from labs.gpu_day.parts import GpuDayPart, parts

H100 = "2 x NVIDIA H100 80GB HBM3"


def day_of(folder: Path, device: str = "cuda", **done: PartState) -> GpuDay:
    day = GpuDay(device, H100, "2026-12-01", {"torch": "2.13.0"}, done)
    day.to(folder)
    return day


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a day on two GPUs leaves, with the names of its machine in it."""
    day_of(tmp_path, checks=PartState("done", 3.0))
    result = LabResult("memory", "measured", (ResultRow("as it comes", "peak memory", 90.0, 100.0, "MiB"),), H100)
    for name, data in {
        "checks/doctor.json": json.dumps(
            {"found": f"{sys.executable} in {Path.home()}/x, {socket.gethostname()}"}
        ).encode(),
        "checks/log.txt": b"not for others",
        "accuracy/one_gpu.jsonl": b'{"model": "gpt2", "step_s": 0.1, "gpu": "NVIDIA H100 80GB HBM3"}\n',
        "training/metrics.jsonl": b'{"out": "/home/somebody/my secret/run", "url": "/scratch/team_7/data/text.bin"}',
        "training/timeline.jsonl.gz": gzip.compress(b'{"hosts":{"0":"vm","1":"bob","2":"vm"},"device":"vm"}'),
        "training/checkpoints/1/weights": b"large",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tmp_path / "lab_memory").mkdir()
    result.save(tmp_path / "lab_memory" / "memory.json.gz")
    return tmp_path


@pytest.mark.tail
@pytest.mark.usefixtures("warm_torchrun")
def test_a_rehearsal_does_its_parts_and_goes_on(tmp_path, capsys):
    arguments = ["--device", "cpu", f"--out={tmp_path / 'day'}"]
    assert main([*arguments, "--yes", "--only", "lab ddp_to_fsdp2", "accuracy"]) == 1  # the other parts are to be done
    printed = capsys.readouterr().out
    assert "a rehearsal on CPU cores" in printed
    assert "Not done: checks, calibration, training, lab memory" in printed
    found = LabResult.load(tmp_path / "day" / "lab_ddp_to_fsdp2" / "ddp_to_fsdp2.json.gz")
    assert found.rows
    assert "CPU cores" in found.hardware
    (written,) = tmp_path.glob("gpu-day-*.zip")
    with zipfile.ZipFile(written) as file:
        assert file.namelist() == ["day.json", "lab_ddp_to_fsdp2/ddp_to_fsdp2.json.gz"]

    assert main([*arguments, "--list"]) == 0
    lines = {line[:18].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert lines["lab ddp_to_fsdp2"].rstrip().endswith("done")
    assert lines["accuracy"].rstrip().endswith("needs a GPU")


def test_the_ten_labs_are_all_parts():
    of_labs = [part.does for name, part in parts().items() if name.startswith("lab ")]
    assert sorted(int(does.split(":")[0].removeprefix("lab ")) for does in of_labs) == list(range(1, 11))


def test_what_failed_or_ran_out_of_time_comes_last():
    states = {
        "a": PartState("failed"),
        "b": PartState("done"),
        "c": PartState("out of time"),
        "d": PartState("needs a GPU"),
    }
    assert GpuDay("cpu", "", "", {}, states).left("abcdef") == ["e", "f", "a", "c"]


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_does_not_end_the_day(tmp_path, monkeypatch):
    monkeypatch.setattr("labs.gpu_day.day.LEAST_S", 0.0)
    nothing = GpuDayPart("", 2.0, lambda folder, device: None)
    day = day_of(tmp_path, "cpu")
    wrong = dict(spent(day, {"no such part": nothing}, ["no such part"], tmp_path, 60.0))["no such part"]
    assert wrong.status in ("failed", "out of time")
    assert json.loads((tmp_path / "day.json").read_text())["parts"]["no such part"]["status"] == wrong.status
    assert list(spent(day, {"late": nothing}, ["late"], tmp_path, -1.0)) == []


def test_a_person_sees_how_far_the_day_is_what_is_left_of_it_and_why_a_part_failed(tmp_path, monkeypatch):
    day_of(tmp_path, "cpu", checks=PartState("done", 3.0))
    broken = GpuDayPart("", 60.0, lambda folder, device: None)
    monkeypatch.setattr("labs.gpu_day.__main__.parts", lambda: {"checks": broken, "no such part": broken})
    monkeypatch.setattr("labs.gpu_day.__main__.hardware_of", lambda device: ("cpu", H100))
    monkeypatch.setattr("labs.gpu_day.__main__.versions", lambda: {"torch": "2.13.0"})
    result = tmp_path / "calibration" / "calibration.json"
    result.parent.mkdir()
    result.write_text("{}")
    failed = PartState("failed", 2.0, "KeyError: 'no such part'")
    monkeypatch.setattr("labs.gpu_day.day._run", lambda *given: failed)  # starting a process takes seconds
    shown = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("labs.gpu_day.__main__.Console", lambda **settings: shown)
    assert main(["--device", "cpu", f"--out={tmp_path}", "--minutes", "20"]) == 1
    printed = shown.file.getvalue()
    assert "no such part, at most 1 min" in printed
    assert "1 of 2 parts 20 of 20 min left" in printed
    assert "calibration/calibration.json " in printed, "whoever gives a file away reads its whole name"
    assert f"KeyError: 'no such part' ({tmp_path / 'no_such_part' / 'log.txt'})" in printed


def test_a_day_is_not_continued_on_other_hardware(tmp_path):
    day_of(tmp_path)
    with pytest.raises(ValueError, match="a day whose hardware was 2 x NVIDIA H100 80GB HBM3, and here it is 1 x A10"):
        GpuDay.of(tmp_path, device="cuda", hardware="1 x A10", date="2026-12-02", versions={"torch": "2.13.0"})


def test_a_bundle_has_what_is_listed_and_no_private_name(folder):
    bundled = {one.name: one for one in bundle.files(folder)}
    assert set(bundled) == {
        "day.json", "checks/doctor.json", "accuracy/one_gpu.jsonl", "training/metrics.jsonl",
        "training/timeline.jsonl.gz", "lab_memory/memory.json.gz",
    }  # fmt: skip
    text = b"".join(
        gzip.decompress(one.data) if one.name.endswith("gz") else one.data for one in bundled.values()
    ).decode()
    for name in (str(Path.home()) + "/", "/home/", "somebody", "secret", "team_7", sys.executable):
        assert name not in text
    assert bundled["checks/doctor.json"].replaced
    assert bundled["training/metrics.jsonl"].replaced == 2
    assert '{"hosts":{"0":"HOST0","1":"HOST1","2":"HOST0"},"device":"vm"}' in text


def test_a_bundle_is_added_to_a_checkout(folder, tmp_path_factory):
    checkout, path = tmp_path_factory.mktemp("checkout"), folder / "b.zip"
    bundle.write(list(bundle.files(folder)), path)
    added = bundle.add(path, checkout)
    assert [line.partition(",")[0] for line in added] == [
        "labs/experiments/recorded/memory.json.gz", "tests/bench/one_h100_80gb_hbm3.jsonl",
    ]  # fmt: skip
    assert LabResult.load(checkout / "labs/experiments/recorded/memory.json.gz").kind == "recorded"


BAD = {
    "no zip": (b"hello", "is no bundle of a GPU day"),
    "no day": ({"checks/doctor.json": b"{}"}, "is no bundle of a GPU day: its day.json"),
    "a file of another kind": ({"../../evil.py": b""}, "'../../evil.py' is no file that a GPU day leaves"),
    "a damaged result": ({"lab_memory/memory.json.gz": b"\x1f\x8b\x08garbage"}, "memory.json.gz is no recorded result"),
    "rows that are none": ({"accuracy/one_gpu.jsonl": b"[1]"}, "has a row that cannot be read"),
}


@pytest.mark.parametrize(("files", "sentence"), BAD.values(), ids=BAD)
def test_a_bad_bundle_is_refused_and_nothing_written(files, sentence, tmp_path):
    path = tmp_path / "b.zip"
    if isinstance(files, bytes):
        path.write_bytes(files)
    else:
        day_of(tmp_path)
        day = {} if sentence.endswith("its day.json") else {"day.json": (tmp_path / "day.json").read_bytes()}
        with zipfile.ZipFile(path, "w") as file:
            for name, data in (day | files).items():
                file.writestr(name, data)
    with pytest.raises(ValueError, match=sentence):
        bundle.add(path, tmp_path / "checkout")
    assert not (tmp_path / "checkout").exists()


def test_a_rehearsal_is_not_kept(tmp_path):
    day_of(tmp_path, "cpu")
    bundle.write(list(bundle.files(tmp_path)), tmp_path / "b.zip")
    with pytest.raises(ValueError, match="of a rehearsal on CPU cores"):
        bundle.add(tmp_path / "b.zip", tmp_path / "checkout")
