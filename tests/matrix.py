"""The versions of torch and Python that this runs with: `make matrix`, or `python -m tests.matrix --torch 2.14.1`.

For each pair an environment of its own under build/matrix, made of the locks and that torch by the functions of
`fsdp_sim/cli/setup.py`, in which the tests that follow torch closely run: recorder, programs, parity, training. A torch
whose CPU build no index has is taken as its default build, which runs on CPU cores too, and is gigabytes of CUDA.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from fsdp_sim.cli import setup

ROOT = setup.ROOT
TORCHES = ("2.13.0", "2.14.1", "2.15.0")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SUITES = {
    "recorder": ("tests/timeline/test_recorder.py",),
    "programs": ("tests/mini/test_programs.py", "tests/measure"),
    "parity": ("tests/mini/parity",),
    "training": ("tests/labs/loop/test_run_state.py", "tests/mini/siblings"),
}


class Outcome(NamedTuple):
    """What came of one environment: a cell for each suite, and whether anything failed."""

    python: str
    torch: str
    cells: tuple[str, ...]
    failed: bool


def interpreters(versions: Sequence[str]) -> list[str]:
    """The Pythons of these versions that are there and run: on PATH, where pyenv's shims may not run, and pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for version in versions:
        names = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python{version}")))]
        runs = (
            n for n in names if shutil.which(n) and subprocess.run([n, "-c", ""], capture_output=True).returncode == 0
        )
        found += list(itertools.islice(runs, 1))
    return found


def environment(python: str, torch: str) -> Path:
    """Make the environment, or take the one that an earlier call has finished; return its Python.

    Raises:
        setup.SetupError: an index lacks something, or cannot be reached.
    """
    version = subprocess.run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True)
    venv = ROOT / "build" / "matrix" / f"python{version.stdout.decode().strip()}-torch{torch}"
    own, done = venv / "bin" / "python", venv / "ready"
    if done.exists():
        return own
    shutil.rmtree(venv, ignore_errors=True)
    venv.mkdir(parents=True)
    with setup.logged(venv) as log:
        setup.make_venv(log, venv, python)
        for lock in (setup.LOCK, setup.DEV_LOCK):
            setup.install_lock(log, venv, lock)
        setup.install(log, venv, "--no-deps", "--no-build-isolation", "-e", ROOT)
        if not setup.pip(log, venv, f"torch=={torch}+cpu", "--extra-index-url", setup.CPU_INDEX)[0]:
            setup.pip_install(log, venv, f"torch=={torch}")
    done.touch()
    return own


def run(own: Path, paths: Sequence[str], options: Sequence[str]) -> tuple[str, bool]:
    """Run some tests; return pytest's closing line, and whether they failed."""
    done = subprocess.run(
        [own, "-m", "pytest", "-q", "-m", "not browser and not tail", "-p", "no:cacheprovider", *paths, *options],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    (own.parents[1] / f"{Path(paths[0]).stem}.log").write_text(done.stdout + done.stderr)
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", (done.stdout.splitlines() or [""])[-1])
    return ", ".join(counts) or f"exit status {done.returncode}", done.returncode != 0


def tried(python: str, torch: str, suites: Sequence[str], options: Sequence[str], console: Console) -> Outcome:
    name = Path(python).name
    console.print(f"{name}, torch {torch}: environment", highlight=False)
    try:
        own = environment(python, torch)
    except setup.SetupError as error:
        return Outcome(name, torch, (str(error), *("" for _ in suites[1:])), True)
    cells, failed = [], False
    for suite in suites:
        console.print(f"{name}, torch {torch}: {suite}", highlight=False)
        cell, wrong = run(own, SUITES[suite], options)
        cells.append(cell)
        failed |= wrong
    return Outcome(name, torch, tuple(cells), failed)


def main(
    torch: tuple[str, ...] = TORCHES,
    python: tuple[str, ...] = PYTHONS,
    suites: tuple[str, ...] = tuple(SUITES),
    options: tuple[str, ...] = (),
) -> int:
    """Try versions of torch and Python, and print a table.

    Args:
        torch: versions of torch; all are tried on the first Python, the first of them on the other Pythons.
        python: versions of Python, of those that are there.
        suites: which tests.
        options: of pytest.
    """
    found = interpreters(python)
    pairs = [(found[0], version) for version in torch] + [(other, torch[0]) for other in found[1:]]
    console = Console(stderr=True)
    outcomes = [tried(*pair, suites, options, console) for pair in pairs]
    table = Table("Python", "torch", *suites)
    for outcome in outcomes:
        table.add_row(outcome.python, outcome.torch, *outcome.cells, style="red" if outcome.failed else "")
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    return int(any(outcome.failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
