"""What is done on a GPU day, in order of worth: each part leaves files in a folder of its own.

    python -m labs.gpu_day.parts NAME FOLDER DEVICE     (one part; `labs.gpu_day.day` starts it like this)

On CPU cores the same parts run with smaller models: the rehearsal.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from labs import experiments
from labs.cluster.process_group import ranks_on
from labs.cluster.torchrun import train
from labs.experiments.gpu_results import lab, on_gpus, record
from labs.experiments.gpu_results import names as lab_names
from labs.experiments.result import LabResult, this_machine
from labs.gpu_day.sizes import ROWS, for_memory_lab, for_training, seq_len

CHECKOUT = Path(__file__).parents[2]
LISTED = re.compile(r"^(\w+) +(\d+) +(.+)$", re.MULTILINE)
"""A line of `labs.experiments` on a lab."""


class GpuDayPart(NamedTuple):
    """A part.

    Attributes:
        does: in words.
        most_s: it is ended after so long, on whatever hardware.
        run: is given its folder and the device.
        on_cpu: whether it means anything without a GPU.
    """

    does: str
    most_s: float
    run: Callable[[Path, str], None]
    on_cpu: bool = True


def checks(folder: Path, device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdp_sim.cli.main", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    json.loads(done.stdout)  # with status 1, too: something is broken, and the file says what
    (folder / "doctor.json").write_text(done.stdout)
    print(done.stdout)


def calibration(folder: Path, device: str) -> None:
    from fsdp_sim.measure.calibrate import calibrate

    found = calibrate(ranks_on(device), device=device, quick=device == "cpu", progress=True)
    found.cluster.to_file(folder / "cluster.toml")
    (folder / "calibration.json").write_text(json.dumps(found.as_dict(), indent=1))


def accuracy(folder: Path, device: str) -> None:
    """26 steps of GPT-2 and Llama on one GPU, each beside its prediction."""
    command = [sys.executable, "-m", "tests.bench.bench_one_gpu", f"--out={folder / 'one_gpu.jsonl'}"]
    subprocess.run(command, cwd=CHECKOUT, check=True)


def training(folder: Path, device: str) -> None:
    """Thirty steps, then four under the profiler, and the simulator's word for them."""
    ranks = ranks_on(device)
    arguments = for_training(ranks, device).replace(steps=30).arguments()
    ran = train(*arguments, "--profile=4", "--predict=true", ranks=ranks, device=device, out=folder)
    print(ran.printed)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def gpu_tests(folder: Path, device: str) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-n",
        "0",
        "tests",
        f"--junitxml={folder / 'tests.xml'}",
    ]
    if subprocess.run(command, cwd=CHECKOUT, check=False).returncode:
        raise RuntimeError("a test of GPUs failed: the log says which")


def _lab(name: str, folder: Path, device: str) -> None:
    run: Callable[..., Any] = lab(name)
    if name in on_gpus():
        sizes: dict[str, Any] = {}
        if name == "memory":
            model = for_memory_lab(ranks_on(device), device)
            sizes = {"model": model, "rows": ROWS, "seq_len": seq_len(model)}
        run = partial(run, device=device, **sizes)
    else:
        device = "cpu"
    hardware = torch.cuda.get_device_name() if device == "cuda" else this_machine("cpu", 1).partition(" on ")[2]
    LabResult.load(record(name, run, hardware, folder)).print(Console(width=150))


def _labs() -> dict[str, GpuDayPart]:
    """All of them, first those that have most to say on a GPU."""
    order = dict.fromkeys(("memory", "overlap", "tune", *on_gpus(), *lab_names()))
    does = {found[1]: f"lab {found[2]}: {found[3]}" for found in LISTED.finditer(experiments.__doc__ or "")}
    return {f"lab {name}": GpuDayPart(does[name], 900.0, partial(_lab, name)) for name in order}


def parts() -> dict[str, GpuDayPart]:
    """All parts by name, in order."""
    return {
        "checks": GpuDayPart("fsdp-sim doctor", 300.0, checks),
        "calibration": GpuDayPart("fsdp-sim calibrate: rates, latencies, links", 900.0, calibration),
        "accuracy": GpuDayPart("26 steps of GPT-2 and Llama beside their predictions", 1500.0, accuracy, on_cpu=False),
        "training": GpuDayPart("the largest GPT with room: 30 steps, and four recorded", 900.0, training),
        **_labs(),
        "tests": GpuDayPart("the tests that need a GPU", 900.0, gpu_tests, on_cpu=False),
    }


if __name__ == "__main__":
    name, folder, device = sys.argv[1:]
    parts()[name].run(Path(folder), device)
