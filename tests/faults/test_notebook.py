"""A kernel that is interrupted or killed while a cell trains leaves no process behind."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.faults.agents import ROOT
from tests.some import some

CELL = """
from labs.cluster.torchrun import torchrun
torchrun("-m", "labs.train", "--steps=100000", "--device=cpu", "--n_layer=1", "--seq_len=32", "--out={out}",
         "--save_every=5", ranks=2)
"""


def ranks_and_launcher(out):
    """Every process that was started for this folder, but the kernel."""
    return [p for p in psutil.process_iter(["cmdline"]) if f"--out={out}" in (p.info["cmdline"] or [])]


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A Python process that runs the cell, as a kernel does: Ctrl-C reaches it alone."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(
        [sys.executable, "-c", CELL.format(out=tmp_path / "run")], cwd=ROOT, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    give_up_s = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):  # it steps
        assert time.monotonic() < give_up_s
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    yield process
    process.kill()
    for left in ranks_and_launcher(tmp_path / "run"):
        left.kill()


@pytest.mark.parametrize("how", some([signal.SIGKILL, signal.SIGINT], first=1))
def test_nothing_is_left_behind(kernel, tmp_path, how):
    started = ranks_and_launcher(tmp_path / "run")
    assert len(started) == 3  # torchrun and two ranks
    os.kill(kernel.pid, how)
    kernel.wait(60)
    _, alive = psutil.wait_procs(started, timeout=40)
    assert not alive
    assert (tmp_path / "run" / "PREEMPTED").exists()  # the ranks saved before they left
