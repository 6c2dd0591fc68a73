"""The base install: four packages, no torch. What it can do, it does; for the rest it names package, extra and the way.

Each command runs in a virtual environment that really has no others: once on the checkout's packages, and in the slow
tail on the wheel, as `pip install .` would leave them.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import fsdp_sim
from fsdp_sim.cli.course_files import course_files
from fsdp_sim.cli.main import COMMANDS

ROOT = Path(fsdp_sim.__file__).parents[1]
RUN_ALL = """
import json, sys, traceback
from click.testing import CliRunner
from fsdp_sim.cli.main import main
found = {}
for command, arguments in json.loads(sys.argv[1]).items():
    done = CliRunner().invoke(main, [command, *arguments])
    crash = done.exception if not isinstance(done.exception, SystemExit) else None
    found[command] = done.exit_code, done.output, crash and "".join(traceback.format_exception(crash))
print(json.dumps(found))
"""
SMALL = ["--model", "gpt2-124m", "--gpu", "A100", "--gpus", "8"]
DOES = {
    "simulate": [*SMALL, "--json"],
    "program": ["--layers", "1"],
    "sweep": [*SMALL, "--vary", "micro_batch=1,2"],
    "fit": SMALL,
    "explain": [*SMALL, "--step-time-s", "0.1", "--json"],
    "tune": [*SMALL, "--vary", "reshard_after_forward", "--json"],
    "doctor": ["--json"],
    "completion": ["bash"],
    "diagnose": ["step.jsonl"],
    "lint": ["--list"],
    "course": ["here"],
}
LACKS = {
    "migrate": (["train.py"], "libcst"),
    "demo": ([], "torch"),
    "ladder": ([], "torch"),
    "calibrate": ([], "torch"),
    "exercises": (["--json"], "torch"),
    "drill": ([], "platformdirs"),
    "mine": ([], "torch"),
    "puzzle": ([], "platformdirs"),
    "lab": (["here"], "jupyterlab"),
    "validate": (["--leave-out", "model"], "scipy"),
}
IN_A_CHECKOUT = {"teach": (["plan", "--list"], 0), "coverage": ([], 2)}
"""The call, and its status in a checkout: `coverage` needs jupytext besides."""


def base_packages() -> set[str]:
    """The distributions of the base install, with what they need in turn."""
    ahead, found = [Requirement(line) for line in metadata.requires("fsdp-sim") or []], set()
    while ahead:
        need = ahead.pop()
        if need.name not in found and (need.marker is None or need.marker.evaluate({"extra": ""})):
            found.add(need.name)
            ahead += map(Requirement, metadata.requires(need.name) or [])
    return found


def base_venv(folder: Path) -> Path:
    """A virtual environment with the base packages of this one and no others; return its site-packages."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    site = next(folder.glob("lib/python3*")) / "site-packages"
    for name in base_packages():
        for file in metadata.distribution(name).files or ():
            top = Path(file.locate()).parents[len(file.parts) - 2] if len(file.parts) > 1 else Path(file.locate())
            if file.parts[0] != ".." and not (site / top.name).exists() and top.name != "__pycache__":
                (site / top.name).symlink_to(top)
    return site


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy of what it is made of: setuptools leaves files beside what it packs."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("fsdp_sim", "labs", "notebooks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-w", out, copy]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module", params=["checkout", pytest.param("wheel", marks=pytest.mark.tail)])
def said(request, tmp_path_factory):
    """What each command said on the base install: its status, its output, and the traceback that it should not have."""
    folder = tmp_path_factory.mktemp("base")
    site = base_venv(folder / "venv")
    if request.param == "wheel":
        zipfile.ZipFile(request.getfixturevalue("wheel")).extractall(site)
    else:
        (site / "checkout.pth").write_text(f"{ROOT}\n")
        # The checkout's own metadata stays out: what a command reads from it would be this environment's.
        (site / "fsdp_sim-0.dist-info").mkdir()
        (site / "fsdp_sim-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp-sim\nVersion: 0\n")
    step = fsdp_sim.simulate("gpt2-124m", fsdp_sim.Cluster("A100", gpus=8), fsdp_sim.Plan(seq_len=64)).timeline
    step.to_jsonl(folder / "step.jsonl")
    (folder / "train.py").write_text("pass\n")
    calls = DOES | {command: arguments for command, (arguments, _) in (LACKS | IN_A_CHECKOUT).items()}
    run = subprocess.run(
        [folder / "venv/bin/python", "-c", RUN_ALL, json.dumps(calls)], cwd=folder, env={"PATH": ""},
        capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout) | {"installed": request.param}


def test_every_command_is_tried():
    assert DOES.keys() | LACKS.keys() | IN_A_CHECKOUT.keys() == COMMANDS.keys()


@pytest.mark.parametrize("command", DOES)
def test_what_needs_no_more_works(said, command):
    status, output, crash = said[command]

    assert crash is None
    assert status == 0, output


@pytest.mark.parametrize("command", LACKS)
def test_what_needs_more_says_what_and_how_to_get_it(said, command):
    status, output, crash = said[command]

    assert crash is None
    assert status == 2
    make = "dev" if command == "migrate" else "setup"  # which learners do not need
    remedy = f"in a checkout of fsdp_sim, run make {make}, or " if said["installed"] == "checkout" else "pip install"
    says = f" needs {LACKS[command][1]}, which is not installed: {remedy}"
    assert [says in line for line in output.splitlines() if line.startswith("Error: ")] == [True], output


@pytest.mark.parametrize("command", IN_A_CHECKOUT)
def test_what_reads_the_notebooks_says_where_there_are_none(said, command):
    status, output, crash = said[command]

    assert crash is None
    if said["installed"] == "checkout":
        assert status == IN_A_CHECKOUT[command][1], output
    else:
        assert status == 2
        assert "there are no notebooks" in output
        assert "checkout" in output


@pytest.mark.tail
def test_the_wheel_has_every_file_of_the_package_and_the_course_and_nothing_else_at_the_top(wheel):
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp_sim").rglob("*.*") if path.is_file()}
    files = {name for name in there if "__pycache__" not in name}

    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}

    assert packed == files | {f"fsdp_sim/_course/{name}" for name in course_files()}
    top = next(name for name in names if name.endswith("/top_level.txt"))
    assert zipfile.ZipFile(wheel).read(top) == b"fsdp_sim\n"
