"""One run at a time in a folder, and a killed run keeps nobody out."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from labs.checkpoint.lock import FolderInUseError, RunLock

ROOT = Path(__file__).parents[3]
HOLD = """
import sys, time, importlib.util
spec = importlib.util.spec_from_file_location("lock", "labs/checkpoint/lock.py")  # without torch: quicker
lock = importlib.util.module_from_spec(spec)
sys.modules["lock"] = lock
spec.loader.exec_module(lock)
from pathlib import Path
with lock.RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_is_refused_and_told_who_has_it(tmp_path, holder):
    with pytest.raises(FolderInUseError) as refused, RunLock(tmp_path):
        pass
    told = str(refused.value)
    assert f"process {holder.pid} on {socket.gethostname()}, since 20" in told
    assert str(tmp_path) in told
    assert "wait for its end, or choose another folder" in told
    assert "\n" not in told


def test_a_killed_run_keeps_nobody_out(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with RunLock(tmp_path):
        pass


def test_it_is_free_after_the_run_and_makes_the_folder(tmp_path):
    with RunLock(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").is_dir()
    with RunLock(tmp_path / "a" / "b"):
        pass


def test_a_holder_that_has_not_said_who_it_is_is_refused_too(tmp_path, holder):
    (tmp_path / "run.owner.json").write_bytes(b"{")
    with pytest.raises(FolderInUseError, match="another run \\(which has just begun\\)"), RunLock(tmp_path):
        pass
