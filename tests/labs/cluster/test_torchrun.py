"""Training under torchrun from Python: its numbers come back, its errors are told, and nothing outlives a call."""

from __future__ import annotations

import io
import math
import sys

import psutil
import pytest

from labs.cluster.torchrun import FailedError, launch, tool_message, train

SMALLEST = ("--device=cpu", "--seq_len=16", "--global_batch=2", "--n_layer=1")
FOREVER = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1], str(os.getpid())).touch(); time.sleep(600)"


def test_its_numbers_come_back(tmp_path):
    run = train(*SMALLEST, "--steps=2", ranks=1, out=tmp_path / "run")
    assert [step["step"] for step in run.steps] == [0, 1]
    assert run.losses == [step["loss"] for step in run.steps]
    assert all(math.isfinite(number) for number in run.losses + run.norms)
    assert (run.report["last_step"], run.report["ranks"]) == (1, 1)
    assert f"step   1  loss {run.losses[1]:.4f}" in run.printed
    assert (run.out / "checkpoints").is_dir()


@pytest.mark.tail
def test_what_failed_is_told_in_the_trainers_own_words():
    with pytest.raises(FailedError, match=r"--lrr=1 ended with status 1: unknown argument '--lrr=1'; did you mean"):
        train(*SMALLEST, "--lrr=1", ranks=1)


@pytest.mark.tail
def test_what_takes_too_long_is_ended_with_all_its_ranks(tmp_path):
    script = tmp_path / "forever.py"
    script.write_text(FOREVER)
    marks = tmp_path / "pids"
    marks.mkdir()
    with pytest.raises(FailedError, match="was still running after 12 s"):
        launch(str(script), str(marks), ranks=2, timeout_s=12)
    assert not any(psutil.pid_exists(int(mark.name)) for mark in marks.iterdir())


BOX = """╭─ Value error ─────────────────────────────────────────────────────╮
│ Error parsing --n_layer: no type matching {None}|INT could be     │
│ instantiated from ['abc'].                                        │
│                                                                   │
│ Got errors:                                                       │
│ - <class 'int'>: invalid literal for int() with base 10: 'abc'    │
│ ───────────────────────────────────────────────────────────────── │
│ For full helptext, see torchrun -m labs.train --help              │
╰───────────────────────────────────────────────────────────────────╯
"""
RULED = """╭─ Invalid choice ───────────────────────────────────────╮
│ invalid choice 'abc' for argument '--family'.          │
│ ────────────────────────────────────────────────────── │
│ For full helptext, run lab.py --help                   │
╰────────────────────────────────────────────────────────╯
"""
LOG = (
    "W1122 02:17:06.272000 14052 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 14058 closing\n"
)
SUMMARY = (
    "E1122 02:17:06.337000 14052 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 2) local_rank"
    ": 1 (pid: 14059) of binary: python\nTraceback (most recent call last):\nChildFailedError:\n" + "=" * 900
)


@pytest.mark.parametrize(
    ("printed", "said"),
    [
        ("labs.train: the disk is full\n", "the disk is full"),
        ("labs.experiments.hugging_face: --csv has no column 'text'\n", "--csv has no column 'text'"),
        (BOX, "Error parsing --n_layer: no type matching {None}|INT could be instantiated from ['abc']."),
        (RULED, "invalid choice 'abc' for argument '--family'."),
        ("Traceback\nZeroDivisionError: division by zero\n", "Traceback\nZeroDivisionError: division by zero"),
    ],
)
def test_of_what_torchrun_prints_the_tools_own_words_are_told(printed, said):
    assert tool_message(LOG + printed + LOG + SUMMARY) == said


def test_where_it_has_no_words_of_its_own_the_end_is_told():
    assert tool_message(LOG + SUMMARY) == "=" * 500
    assert tool_message("x" * 9000) == "x" * 500


@pytest.mark.tail
def test_a_bar_leaves_nothing_and_without_a_step_there_is_none(monkeypatch):
    """What a notebook would keep, as a terminal shows it: a carriage return takes back the line."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdout", terminal)
    launch("--no-python", sys.executable, "-c", "print(1)", ranks=1)
    assert terminal.getvalue() == ""
    steps = "import time\nfor i in range(3): print(f'step {i} loss 1.0', flush=True); time.sleep(0.5)"
    launch("--no-python", sys.executable, "-c", steps, ranks=1)
    assert "training: 2 steps" in terminal.getvalue()
    assert terminal.getvalue().rpartition("\r")[2] == ""
    assert terminal.getvalue().rstrip("\r").rpartition("\r")[2].strip() == ""
