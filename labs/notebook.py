"""What the lab sections of the notebooks call: the commands one would type, with their output shown."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fsdp_sim.accelerators import environ_for


@dataclass(frozen=True)
class LabRun:
    """What a lab command did: its output and the metrics it wrote, one dict per step."""

    output: str
    metrics: list[dict[str, float]]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics]


# On Linux the command is told to leave when the kernel that started it dies, be it by SIGKILL: torchrun passes it on,
# and the ranks save and leave. On other systems it runs to its end.
TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which outlasts exec
os.execv(sys.argv[1], sys.argv[1:])
"""


def torchrun(*arguments: str, ranks: int = 2, timeout_s: float = 300.0) -> LabRun:
    """Run ``torchrun --standalone --nproc_per_node=RANKS ARGUMENTS`` and print the command and what it prints.

    It runs on CPU cores and sees no GPU; with ``--device=cuda`` among the arguments it does.

    Raises:
        RuntimeError: the command failed (with the end of its output) or took longer than ``timeout_s``.
    """
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        launcher = ["--standalone", f"--nproc_per_node={ranks}"]
        print("$ torchrun", *launcher, *arguments)
        command = [sys.executable, "-c", TIED, sys.executable, "-m", "torch.distributed.run", *launcher, *arguments]
        command.append(f"--metrics={metrics}")
        environ = environ_for("cuda" if "--device=cuda" in arguments else "cpu")
        env = {"OMP_NUM_THREADS": "1"} | environ  # else torchrun sets it, and says so in five lines
        try:
            done = subprocess.run(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=env,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"torchrun was still running after {timeout_s:g} s: {error.stdout!r}") from error
        print(done.stdout)
        if done.returncode:
            raise RuntimeError(f"torchrun ended with exit code {done.returncode}; its output is above")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return LabRun(done.stdout, [line for line in lines if "loss" in line])  # the others are events
