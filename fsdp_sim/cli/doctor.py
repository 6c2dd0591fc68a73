"""``fsdp-sim doctor``: what works on this machine, and what to do about the rest.

Each check does the thing it speaks of: it imports the package, starts the ranks, asks the driver. Parts build on one
another from top to bottom, so the first one that fails is the one to mend.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fsdp_sim.cli.doctor_finding import DoctorFinding, torch_here
from fsdp_sim.cli.doctor_gpus import gpu_links, gpus, nccl
from fsdp_sim.cli.doctor_system import (
    browser,
    compiler,
    disk,
    limits,
    machine,
    ports,
    shared_memory,
    temporary_folder,
)
from fsdp_sim.cli.options import print_json, schema_option
from fsdp_sim.packages import OLDEST_TORCH, in_checkout, is_untried, release, remedy, requirement

COLOURS = {"works": "green", "absent": "yellow", "broken": "red"}


def python() -> DoctorFinding:
    version = platform.python_version()
    good = (3, 11) <= sys.version_info[:2] < (3, 15)
    mend = in_checkout("run make PYTHON=/path/to/it setup", "install fsdp_sim with it")
    return DoctorFinding(
        "Python", "works" if good else "broken", f"{version}, {sys.executable}", "everything",
        "" if good else f"install Python 3.11 to 3.14 and {mend}",
    )  # fmt: skip


def simulator() -> DoctorFinding:
    from fsdp_sim import Cluster, Plan, simulate

    step_s = simulate("gpt2-124m", Cluster("A100-SXM-80GB", gpus=8), Plan(seq_len=64)).step_time_s
    return DoctorFinding(
        "simulator", "works", f"predicted a step of {step_s * 1e3:.1f} ms", "simulate, sweep, fit, validate"
    )


def package(name: str, needed_for: str) -> Callable[[], DoctorFinding]:
    def check() -> DoctorFinding:
        try:
            version = getattr(importlib.import_module(name), "__version__", "installed")
        except ModuleNotFoundError:
            return DoctorFinding(name, "absent", "not installed", needed_for, remedy(name))
        return DoctorFinding(name, "works", str(version), needed_for)

    check.__name__ = name
    return check


def torch_build() -> DoctorFinding:
    needed_for = "the mini-FSDP, ranks, labs"
    try:
        torch = torch_here()
    except ModuleNotFoundError:
        return DoctorFinding("torch", "absent", "not installed", needed_for, remedy("torch"))
    version = torch.__version__
    if release(version) < OLDEST_TORCH:
        newer = in_checkout("make TORCH=cpu setup installs one that will do", "pip install --upgrade torch")
        return DoctorFinding("torch", "broken", version, needed_for, newer)
    found = f"{version}, newer than those this was tried with" if is_untried(version) else version
    if release(version) >= (2, 15):
        found += (
            "; without a reduce_dtype it reduces gradients in the parameters' own dtype, 2.13 and 2.14 in param_dtype"
        )
    return DoctorFinding("torch", "works", found, needed_for)


def ranks() -> DoctorFinding:
    from fsdp_sim.ranks import run

    def total() -> float:
        torch = torch_here()
        x = torch.ones(4)
        torch.distributed.all_reduce(x)
        return float(x.sum())

    sums = list(run(total, world_size=2, timeout_s=60))
    good = sums == [8.0, 8.0]
    found = "2 processes summed a tensor over gloo" if good else f"2 processes disagree: {sums}"
    return DoctorFinding(
        "ranks on this machine", "works" if good else "broken", found, "the mini-FSDP, labs, notebooks"
    )


CHECKS: tuple[Callable[[], DoctorFinding], ...] = (
    python, machine, disk, temporary_folder, limits, ports, simulator,
    package("pandas", "tables of sweeps"), package("scipy", "fitting to measurements"),
    torch_build, ranks, shared_memory, gpus, gpu_links, nccl, compiler,
    package("plotly", "figures"), package("jupyterlab", "the notebooks"), browser,
)  # fmt: skip


def examine(check: Callable[[], DoctorFinding]) -> DoctorFinding:
    """Run a check; one that raises has found something broken."""
    name = check.__name__.replace("_", " ")
    try:
        return check()
    except ModuleNotFoundError as error:
        return DoctorFinding(name, "absent", f"{error.name} is not installed", "see above", remedy(error.name or ""))
    except Exception as error:  # whatever goes wrong on a stranger's machine is what this command is for
        text = str(error).splitlines()
        what = f"{type(error).__name__}: {text[0] if text else ''}"
        anew = in_checkout("run make setup", f"pip install --force-reinstall '{requirement('course')}'")
        return DoctorFinding(name, "broken", what[:200], "see README, When something fails", anew)


@click.command(epilog="Exit status: 0 if nothing is broken, 1 if something is.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@schema_option("doctor")
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
        print_json("doctor", {"checks": [asdict(f) for f in findings]})
    else:
        table = Table("", "", "found", "needed for", "what to do", box=None, header_style="bold", padding=(0, 2, 0, 0))
        for column in table.columns:
            column.overflow = "fold"  # a command that is cut cannot be copied
        for f in findings:
            colour = COLOURS[f.state]
            table.add_row(
                escape(f.part), f"[{colour}]{f.state}[/]", escape(f.found), escape(f.needed_for), escape(f.remedy)
            )
        Console().print(table)
    sys.exit(any(f.state == "broken" for f in findings))
