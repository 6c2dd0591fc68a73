"""Help that starts quickly, and whose examples work."""

import subprocess
import sys

import pytest

from fsdp_sim.cli.main import COMMANDS
from tests.cli.commands import call, examples

PREPARED = {"diagnose", "lint", "migrate", "teach"}  # theirs read files: tests of these commands prepare them
# Also what asks, and what serves until it is stopped.
LONG = {"calibrate", "completion", "demo", "doctor", "drill", "lab", "ladder", "mine", "puzzle", "tune", "validate"}


def test_it_names_every_command():
    lines = [" ".join(line.split()) for line in call("--help").output.splitlines()]
    assert [f"{name} {entry.help}" for name, entry in COMMANDS.items() if f"{name} {entry.help}" not in lines] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples_and_says_its_exit_status(command):
    shown = call(command, "--help")
    assert shown.exit_code == 0
    assert examples(command)
    assert ("Exit status" in shown.output) == (command != "demo")  # which answers nothing


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - PREPARED - LONG))
def test_examples_work(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in examples(command):
        assert call(*example).exit_code in ((0, 1) if command == "coverage" else (0,)), example


@pytest.mark.parametrize("words", ["--help", "teach plan --list", "drill list"])
def test_what_only_prints_imports_neither_torch_nor_figures(words):
    script = (
        f"import sys; from fsdp_sim.cli.main import main; main({words.split()}, standalone_mode=False); "
        "print(sorted({'torch', 'plotly', 'ipywidgets', 'fsdp_sim.cli.demo'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
