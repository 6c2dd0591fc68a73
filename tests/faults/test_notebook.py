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
from tests.warm import ADDRESS, CLIENT

CELL = """
from labs.cluster import torchrun
torchrun.TIED = torchrun.TIED.partition("os.execv")[0] + {client!r}  # tied to this process, and forked
torchrun.torchrun("-m", "labs.train", "--steps=100000", "--device=cpu", "--n_layer=1", "--seq_len=32", "--out={out}",
                  "--save_every=5", ranks=2)
"""


def ranks_and_launcher(folder, kernel):
    """Every process that was started in this folder, but the kernel."""
    return [p for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder) and p.pid != kernel.pid]


@pytest.fixture
def kernel(tmp_path, monkeypatch, warm_server):
    """A Python process that runs the cell, as a kernel does: Ctrl-C reaches it alone."""
    for name, value in {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), ADDRESS: warm_server}.items():
        monkeypatch.setenv(name, value)
    process = subprocess.Popen(
        [sys.executable, "-c", CELL.format(out=tmp_path / "run", client=CLIENT)], cwd=tmp_path, start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    give_up_s = time.monotonic() + 120
    while not list((tmp_path / "run" / "checkpoints").glob("step-*")):  # it steps
        assert time.monotonic() < give_up_s
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    yield process
    process.kill()
    for left in ranks_and_launcher(tmp_path, process):
        left.kill()


@pytest.mark.parametrize("how", some([signal.SIGKILL, signal.SIGINT], first=1))
def test_nothing_is_left_behind(kernel, tmp_path, how):
    started = ranks_and_launcher(tmp_path, kernel)
    assert len(started) == 1 + 3  # who waits for torchrun, which was forked, and two ranks
    os.kill(kernel.pid, how)
    kernel.wait(60)
    _, alive = psutil.wait_procs(started, timeout=40)
    assert not alive
    assert (tmp_path / "run" / "PREEMPTED").exists()  # the ranks saved before they left
