"""Training under torchrun from Python: its numbers come back, its errors are told, and nothing outlives a call."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from labs.trained import FailedError, torchrun, train, what_it_said

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


def test_what_failed_is_told_in_the_trainers_own_words():
    with pytest.raises(FailedError, match=r"--lrr=1 ended with status 1: unknown argument '--lrr=1'; did you mean"):
        train(*SMALLEST, "--lrr=1", ranks=1)


def test_what_takes_too_long_is_ended_with_all_its_ranks(tmp_path):
    script = tmp_path / "forever.py"
    script.write_text(FOREVER)
    marks = tmp_path / "pids"
    marks.mkdir()
    with pytest.raises(FailedError, match="was still running after 12 s"):
        torchrun(str(script), str(marks), ranks=2, timeout_s=12)
    assert not any(psutil.pid_exists(int(mark.name)) for mark in marks.iterdir())


@pytest.mark.parametrize(
    "signal_", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.skipif(
        sys.platform != "linux", reason="needs Linux: the parent-death signal is its own"))],
)  # fmt: skip
def test_nothing_outlives_who_called(signal_, tmp_path):
    script = tmp_path / "forever.py"
    script.write_text(FOREVER)
    marks = tmp_path / "pids"
    marks.mkdir()
    call = f"from labs.trained import torchrun; torchrun({str(script)!r}, {str(marks)!r}, ranks=2)"
    caller = subprocess.Popen([sys.executable, "-c", call], stderr=subprocess.DEVNULL, env={**os.environ})
    give_up_s = time.monotonic() + 120
    while len(ranks := list(marks.iterdir())) < 2:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    caller.send_signal(signal_)
    caller.wait(60)
    gone = psutil.wait_procs([psutil.Process(int(r.name)) for r in ranks if psutil.pid_exists(int(r.name))], 60)[1]
    assert not gone


def test_of_what_torchrun_prints_the_trainers_words_are_told():
    stderr = (
        "W0101 torch/distributed/run.py:852] \nlabs.train: the disk is full\nTraceback\nChildFailedError:\n" + "=" * 900
    )
    assert what_it_said(stderr) == "the disk is full"
    assert len(what_it_said("x" * 9000)) == 500
