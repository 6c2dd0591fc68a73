"""Processes that find GPUs which are not there, see `sitecustomize`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def environ(gpus: int | str, log: Path, **more: str) -> dict[str, str]:
    """The environment of a process whose torch finds so many GPUs, and of all that it starts."""
    log.touch()
    path = os.pathsep.join([str(HERE), str(ROOT)])
    return os.environ | {"PYTHONPATH": path, "FAKED_GPUS": str(gpus), "FAKED_GPUS_LOG": str(log)} | more


def python(code: str, gpus: int | str, log: Path, **more: str) -> str:
    """What a script prints on a machine with so many GPUs."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environ(gpus, log, **more), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
