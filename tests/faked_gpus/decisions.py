"""What is decided on a machine before anything runs on its GPUs, for each of `MACHINES` and 1, 2 and 8 of them.

python -m tests.faked_gpus.decisions        (the table of docs/gpu_day.md)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.faked_gpus import ROOT, environ
from tests.faked_gpus.sitecustomize import MACHINES

COUNTS = (1, 2, 8)


class Decisions(NamedTuple):
    """Of one machine.

    Attributes:
        rates_of: the catalogue's name of the GPU, or what it is taken to be like.
        memory_model, training_model, dtype: see `labs.gpu_day.sizes`.
        most_bytes: the larger predicted peak of the two, 0 for the smallest model.
        half: the half precision that lab 2 tries. lab_5: the dtypes of lab 5.
    """

    machine: str
    gpus: int
    ranks: int
    rates_of: str
    memory_model: str
    training_model: str
    dtype: str
    most_bytes: int
    half: str
    lab_5: list[str]


def decided(machines: Sequence[str] = tuple(MACHINES), counts: Sequence[int] = COUNTS) -> list[Decisions]:
    """Asked of one process whose torch finds such GPUs, one machine after the other."""
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps([(machine, count) for machine in machines for count in counts])
        command = [sys.executable, "-m", "tests.faked_gpus.decisions", asked]
        env = environ(1, Path(folder, "log"))
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [Decisions(*one) for one in json.loads(done.stdout.splitlines()[-1])]


def _become(machine: str, gpus: int) -> None:
    """Let this process find other GPUs. What it would ask a process of its own for each is what its own torch says."""
    import torch

    from fsdp_sim import accelerators

    os.environ |= {"FAKED_GPU": machine, "FAKED_GPUS": str(gpus)}
    torch.cuda.device_count.cache_clear()
    accelerators._found = lambda visible: tuple(accelerators._look())


def _here(machine: str) -> Decisions:
    import torch

    from labs.cluster.process_group import ranks_on
    from labs.config import TrainConfig
    from labs.experiments.memory import settings
    from labs.experiments.numerics.losses import dtypes
    from labs.gpu_day.sizes import ROWS, SMALLEST, for_memory_lab, for_training, peak_bytes
    from labs.measure.simulated import gpu_here

    ranks, part = ranks_on("cuda"), gpu_here(torch.device("cuda", 0))
    model, config = for_memory_lab(ranks, "cuda"), for_training(ranks, "cuda")
    dtype = config.plan.param_dtype
    most = [peak_bytes(model, ranks, rows=2 * ROWS, api="ddp")] if model != SMALLEST else []
    if config.model != SMALLEST:
        most.append(peak_bytes(config.model, ranks, param_dtype=dtype if dtype != "fp32" else None))
    settings_2 = settings(TrainConfig(model=model, device="cuda"), ranks, ROWS)
    half = next(name for name in settings_2 if "param_dtype" in name)
    rates_of = part.name if part.sources else part.notes.partition(" of those of ")[2].partition(",")[0] + " in part"
    return Decisions(
        machine, torch.cuda.device_count(), ranks, rates_of, model, config.model, str(dtype), max(most, default=0),
        half, dtypes("cuda"),
    )  # fmt: skip


def table(found: Sequence[Decisions]) -> str:
    """All of them in markdown, where the number of GPUs makes no difference in one line."""
    lines = ["| GPU | how many | rates of | lab 2's model | the training's | computes in |", "|" + " --- |" * 6]
    counts: dict[tuple[str, ...], list[int]] = {}
    for one in found:
        cells = (one.rates_of, one.memory_model, one.training_model, one.dtype)
        counts.setdefault((one.machine, *cells), []).append(one.gpus)
    lines += [f"| {' | '.join((gpu, ', '.join(map(str, of)), *cells))} |" for (gpu, *cells), of in counts.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    if not sys.argv[1:]:
        print(table(decided()))
        sys.exit()
    everything = []
    for name, n in json.loads(sys.argv[1]):
        _become(name, n)
        everything.append(_here(name))
    print(json.dumps(everything))
