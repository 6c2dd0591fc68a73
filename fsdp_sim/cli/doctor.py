"""``fsdp-sim doctor``: what works on this machine, and what to do about the rest.

Each check does the thing it speaks of: it imports the package, starts the ranks, asks the driver. Parts build on one
another from top to bottom, so the first one that fails is the one to mend.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click
from rich.console import Console
from rich.table import Table

State = Literal["works", "absent", "broken"]
SETUP = "run make setup in a checkout"
COLOURS = {"works": "green", "absent": "yellow", "broken": "red"}


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        part: what was checked.
        state: ``works``; ``absent``, which only its own part of the project needs; ``broken``, which should work.
        found: in a few words.
        needed_for: what cannot be had without it.
        remedy: what to do; empty where it works.
    """

    part: str
    state: State
    found: str
    needed_for: str
    remedy: str = ""


def python() -> Finding:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 15)
    return Finding(
        "Python", "works" if good else "broken", f"{version}, {sys.executable}", "everything",
        "" if good else "install Python 3.11 to 3.14 and run make PYTHON=/path/to/it setup",
    )  # fmt: skip


def simulator() -> Finding:
    from fsdp_sim import Cluster, Plan, simulate

    step_s = simulate("gpt2-124m", Cluster("A100-SXM-80GB", gpus=8), Plan(seq_len=64)).step_time_s
    return Finding("simulator", "works", f"predicted a step of {step_s * 1e3:.1f} ms", "simulate, sweep, fit, validate")


def package(name: str, extra: str, needed_for: str) -> Callable[[], Finding]:
    def check() -> Finding:
        try:
            version = getattr(importlib.import_module(name), "__version__", "installed")
        except ModuleNotFoundError:
            return Finding(name, "absent", "not installed", needed_for, f"pip install 'fsdp-sim[{extra}]', or {SETUP}")
        return Finding(name, "works", str(version), needed_for)

    check.__name__ = name
    return check


def _torch() -> Any:
    """torch, if it is there: this command has to run where it is not."""
    return importlib.import_module("torch")


def torch_build() -> Finding:
    needed_for = "the mini-FSDP, ranks, labs"
    try:
        torch = _torch()
    except ModuleNotFoundError:
        return Finding("torch", "absent", "not installed", needed_for, f"pip install 'fsdp-sim[mini]', or {SETUP}")
    good = (2, 11) <= tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 14)
    remedy = "" if good else "install torch 2.13.0 (make TORCH=cpu setup, or cuda)"
    return Finding("torch", "works" if good else "broken", torch.__version__, needed_for, remedy)


def ranks() -> Finding:
    from fsdp_sim.ranks import run

    def total() -> float:
        torch = _torch()
        x = torch.ones(4)
        torch.distributed.all_reduce(x)
        return float(x.sum())

    sums = list(run(total, world_size=2, timeout_s=60))
    good = sums == [8.0, 8.0]
    found = "2 processes summed a tensor over gloo" if good else f"2 processes disagree: {sums}"
    return Finding("ranks on this machine", "works" if good else "broken", found, "the mini-FSDP, labs, notebooks")


def gpus() -> Finding:
    from fsdp_sim.spec import gpu

    torch = _torch()

    needed_for = "labs on GPUs, fsdp-sim calibrate --device cuda"
    if not torch.cuda.is_available():
        driver = shutil.which("nvidia-smi") is not None
        remedy = "there is a driver: make TORCH=cuda setup" if driver else "none is needed for the course"
        return Finding("GPUs", "absent", "torch finds none", needed_for, remedy)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    try:
        known = gpu(names[0]).name
    except ValueError:
        known = "not in the catalogue: fsdp-sim calibrate measures it"
    nccl = "with NCCL" if torch.distributed.is_nccl_available() else "without NCCL"
    return Finding("GPUs", "works", f"{len(names)} x {names[0]} ({known}), {nccl}", needed_for)


def shared_memory() -> Finding:
    needed_for = "NCCL, and Chromium's pages"
    if not os.path.isdir("/dev/shm"):
        return Finding("shared memory", "absent", "no /dev/shm", needed_for, "not used on this system")
    free = shutil.disk_usage("/dev/shm").free
    good = free >= 64 * 2**20
    remedy = "" if good else "start the container with --shm-size=1g"
    return Finding("shared memory", "works" if good else "broken", f"{free / 2**20:,.0f} MiB free", needed_for, remedy)


def chromium() -> Finding:
    needed_for = "pictures of figures (PNG, SVG), browser tests"
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        return Finding("Chromium", "absent", "not found", needed_for, "apt install chromium, or any Chrome on the PATH")
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    good = version.returncode == 0
    found = version.stdout.strip() if good else version.stderr.strip()[:120]
    return Finding("Chromium", "works" if good else "broken", found, needed_for, "" if good else "reinstall it")


def machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        import psutil
    except ModuleNotFoundError:
        return Finding("machine", "works", f"{cores} cores", "4 ranks are comfortable on 2 cores and 8 GiB")
    gib = psutil.virtual_memory().available / 2**30
    good = gib >= 3
    remedy = "" if good else "close other programs; the notebooks start 4 ranks"
    found = f"{cores} cores, {gib:.1f} GiB of memory free"
    return Finding("machine", "works" if good else "broken", found, "the notebooks: 4 ranks, about 3 GiB", remedy)


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, machine, simulator,
    package("pandas", "explore", "tables of sweeps"), package("scipy", "explore", "fitting to measurements"),
    torch_build, ranks, gpus, shared_memory,
    package("plotly", "notebooks", "figures"), package("jupyterlab", "notebooks", "the notebooks"), chromium,
)  # fmt: skip


def examine(check: Callable[[], Finding]) -> Finding:
    """Run a check; one that raises has found something broken."""
    name = check.__name__.replace("_", " ")
    try:
        return check()
    except ModuleNotFoundError as error:
        return Finding(name, "absent", f"{error.name} is not installed", "see above", SETUP)
    except Exception as error:  # whatever goes wrong on a stranger's machine is what this command is for
        text = str(error).splitlines()
        what = f"{type(error).__name__}: {text[0] if text else ''}"
        return Finding(name, "broken", what[:200], "see README, When something fails", SETUP)


@click.command(epilog="Exit status: 0 if nothing is broken, 1 if something is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def doctor(as_json: bool) -> None:
    """Say what works on this machine, and what to do about the rest.

    \b
    Examples:
      fsdp-sim doctor
      fsdp-sim doctor --json
    """
    console = Console(stderr=True)
    findings = []
    with console.status("") as status:
        for check in CHECKS:
            status.update(f"checking {check.__name__.replace('_', ' ')}")
            findings.append(examine(check))
    if as_json:
        click.echo(json.dumps({"checks": [asdict(f) for f in findings]}, indent=1))
    else:
        table = Table("", "", "found", "needed for", "what to do", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for f in findings:
            table.add_row(f.part, f"[{COLOURS[f.state]}]{f.state}[/]", f.found, f.needed_for, f.remedy)
        Console().print(table)
    sys.exit(any(f.state == "broken" for f in findings))
