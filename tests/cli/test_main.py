"""The group of commands: known without being imported, and clear about what a command lacks."""

import importlib
import json
import os
import pty
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from fsdp_sim.cli import main as cli
from tests.cli.commands import call


def test_a_command_whose_package_is_missing_names_package_and_extra(tmp_path, monkeypatch):
    (tmp_path / "needy_command.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "needy", cli.CommandEntry("needy_command:run", "Needs much."))

    run = CliRunner().invoke(cli.main, ["needy"])

    assert run.exit_code == 2
    assert (
        run.output
        == "Error: fsdp-sim needy needs no_such_package, which is not installed: pip install no_such_package\n"
    )


def test_a_package_that_is_missed_while_a_command_runs_is_named_as_well_and_in_json_where_that_is_asked_for(
    monkeypatch,
):
    @click.command()
    @click.option("--json", is_flag=True)
    def late(json):
        importlib.import_module("platformdirs")

    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.setattr(cli, "late", late, raising=False)
    monkeypatch.setitem(cli.COMMANDS, "late", cli.CommandEntry("fsdp_sim.cli.main:late", "Needs much."))
    sentence = (
        "fsdp-sim late needs platformdirs, which is not installed: in a checkout of fsdp_sim, run make setup, or "
        "pip install -e '.[labs]'"
    )

    assert CliRunner().invoke(cli.main, ["late"]).stderr == f"Error: {sentence}\n"
    assert json.loads(CliRunner().invoke(cli.main, ["late", "--json"]).stdout) == {"error": sentence}


def read(terminal: int) -> bytes:
    """What a terminal shows next; nothing once nobody writes to it any more."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""


@pytest.mark.parametrize(("words", "said"), [
    ("simulate --model gpt2-124m --gpu A100 --gpus 8", "simulating gpt2-124m"),
    ("fit --largest layers --d-model 256 --heads 4 --d-ffn 1024 --vocab 512 --gpu A100 --gpus 8",
     "looking for the largest number of layers that fits"),
])  # fmt: skip
def test_a_command_that_may_take_long_says_on_a_terminal_what_it_does(words, said):
    """And nowhere else: what is piped has nothing of it."""
    main_side, terminal = pty.openpty()
    command = [sys.executable, "-m", "fsdp_sim.cli.main", *words.split()]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, text=True, env=env) as running:
        os.close(terminal)
        shown = b"".join(iter(lambda: read(main_side), b"")).decode()
        printed, _ = running.communicate()
    os.close(main_side)

    assert said in shown
    assert shown.endswith("\x1b[2K")  # and the line is gone again
    assert said not in printed
    assert call(*words.split()).stderr == ""
