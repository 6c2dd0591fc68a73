"""The checklist of someone who has just made a training loop run under FSDP, checked by running it here.

    python -m labs.checklist                        2, 4 and 8 ranks, a small GPT
    python -m labs.checklist --ranks 2 4            fewer
    python -m labs.checklist --model gpt2 --seq-len 512 --rows 16        on GPUs, something larger

Every line trains for real under torchrun and compares numbers. The last lines say on which hardware that was.
Exit status: 0 when all was verified, 1 when something was not.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

CLOSE = 1e-5
"""Relative: other ranks and other APIs add the same numbers in another order."""

BF16_CLOSE = 0.02


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to check with."""

    ranks: tuple[int, ...] = (2, 4, 8)
    """Numbers of ranks to try; on one machine."""
    model: str = "teaching"
    """A preset of labs.train."""
    rows: int = 8
    """Rows per step over all ranks; every number of ranks divides it."""
    seq_len: int = 64
    """Tokens per row."""
    steps: int = 6
    """Steps per run."""


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run left behind."""

    losses: list[float]
    norms: list[float]
    report: dict[str, Any]
    out: Path


class FailedError(Exception):
    """A line of the checklist that did not come true."""


class Runs:
    """Trains on demand, each setting once."""

    def __init__(self, asked: Asked, folder: Path) -> None:
        self.asked, self.folder = asked, folder
        self._n = 0
        self.run = cache(self._run)

    def _run(self, ranks: int, *arguments: str) -> Trained:
        self._n += 1
        return self.again(self.folder / f"run-{self._n}", ranks, *arguments)

    def again(self, out: Path, ranks: int, *arguments: str) -> Trained:
        asked = self.asked
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m",
            "labs.train", f"--model={asked.model}", f"--global_batch={asked.rows}", f"--seq_len={asked.seq_len}",
            f"--steps={asked.steps}", f"--out={out}", *arguments,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"} | os.environ, check=False
        )
        if done.returncode:
            raise FailedError(f"{' '.join(command[2:])} ended with status {done.returncode}: {done.stderr[-2000:]}")
        lines = [msgspec.json.decode(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
        steps = [line for line in lines if "loss" in line]
        report = msgspec.json.decode((out / "report.json").read_bytes())
        return Trained([s["loss"] for s in steps], [s["grad_norm"] for s in steps], report, out)


def off(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    if len(a) != len(b):
        raise FailedError(f"{len(a)} steps and {len(b)}")
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def same(what: str, a: list[float], b: list[float], tolerance: float = CLOSE) -> str:
    worst = off(a, b)
    if not worst <= tolerance:
        raise FailedError(f"{what} differ by {worst:.1e}, more than {tolerance:g}")
    return f"{what} within {worst:.0e}"


def falls(losses: list[float]) -> str:
    if not losses[-1] < losses[0]:
        raise FailedError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"


# ---- The lines of the list ------------------------------------------------------------------------------------------

Check = Callable[[], str]


def checks(runs: Runs) -> Iterator[tuple[str, Check]]:
    """What is to be verified and how; a check returns what it saw, or raises `FailedError`."""
    few = min(runs.asked.ranks)

    def single() -> Trained:
        return runs.run(1, "--api=single")

    yield "one process, no FSDP", lambda: falls(single().losses)

    def like_one(ranks: int) -> str:
        return same("losses of one process", runs.run(ranks).losses, single().losses)

    for ranks in runs.asked.ranks:
        yield f"{ranks} ranks, FSDP2", partial(like_one, ranks)
    yield "loss like DDP's", lambda: same("losses", runs.run(few).losses, runs.run(few, "--api=ddp").losses)
    yield "FSDP1 too", lambda: same("losses", runs.run(few, "--api=fsdp1").losses, single().losses)
    yield "memory is divided by the ranks", lambda: _memory(runs, max(runs.asked.ranks))
    yield "a checkpoint is written", lambda: _saved(runs.run(few))
    yield "and gone on from, bit for bit", lambda: _resumed(runs, few)
    yield "and by one process", lambda: _resumed_elsewhere(runs, few)
    yield "torch.compile", lambda: same("losses", runs.run(few, *_compile()).losses, single().losses, 1e-4)
    yield "clipping", lambda: _clipping(runs, few)
    yield (
        "mixed precision, bf16",
        lambda: same("losses", runs.run(few, "--param_dtype=bf16").losses, single().losses, BF16_CLOSE),
    )


def _memory(runs: Runs, ranks: int) -> str:
    alone, each = (runs.run(n).report["state_bytes"] for n in (1, ranks))
    share = max(each) / alone[0]
    if not share < 1.15 / ranks:
        raise FailedError(f"a rank of {ranks} keeps {share:.1%} of what one process keeps")
    alone_mb, each_mb = alone[0] / 1e6, max(each) / 1e6
    return f"parameters and AdamW: {alone_mb:.2f} MB in one process, {each_mb:.2f} MB on each of {ranks} ranks"


def _saved(run: Trained) -> str:
    (newest,) = sorted((run.out / "checkpoints").glob("step-*"))[-1:]
    n_bytes = sum(path.stat().st_size for path in newest.rglob("*"))
    return f"{newest.name}, {n_bytes / 1e6:.1f} MB, with a manifest of SHA-256"


def _resumed(runs: Runs, ranks: int) -> str:
    whole, half, out = runs.run(ranks), runs.asked.steps // 2, runs.folder / "resumed"
    runs.again(out, ranks, f"--steps={half}")
    second = runs.again(out, ranks)
    if second.losses != whole.losses:
        raise FailedError(f"losses differ from those of the uninterrupted run: {second.losses} and {whole.losses}")
    return f"losses of steps {half} to {runs.asked.steps - 1} are the very same"


def _resumed_elsewhere(runs: Runs, ranks: int) -> str:
    out = runs.folder / "elsewhere"
    runs.again(out, ranks, f"--steps={runs.asked.steps // 2}")
    return same("losses", runs.again(out, 1, "--api=single").losses, runs.run(ranks).losses)


def _compile() -> tuple[str, ...]:
    compiler = shutil.which("g++") or shutil.which("clang++") or torch.cuda.is_available()
    return ("--compile=true",) if compiler else ("--compile=true", "--compile_backend=aot_eager")


def _clipping(runs: Runs, ranks: int) -> str:
    alone = runs.run(1, "--api=single", "--clip=0.5")
    for api in ("fsdp2", "fsdp1"):
        run = runs.run(ranks, f"--api={api}", "--clip=0.5")
        same(f"norms of {api}", run.norms, alone.norms, 1e-4)
        same(f"losses of {api}", run.losses, alone.losses, 1e-4)
    if not max(alone.norms) > 0.5:
        raise FailedError(f"no norm was above 0.5 ({max(alone.norms):.3f} at most): nothing was clipped")
    return f"the norm of all gradients ({alone.norms[0]:.3f} in step 0) is that of one process, FSDP1 too"


def hardware() -> str:
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    where = (
        f"{len(gpus)} x {gpus[0]}, NCCL" if gpus else f"no GPU; {os.cpu_count()} CPU cores ({platform.machine()}), gloo"
    )
    return f"{where}; torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"


def main(asked: Asked) -> int:
    console, table, start_s = Console(), Table("verified", "", "what was seen"), time.perf_counter()
    bad = [ranks for ranks in asked.ranks if asked.rows % ranks]
    if bad:
        console.print(f"rows={asked.rows} does not divide into {bad[0]} ranks; use a multiple of {max(asked.ranks)}")
        return 2
    failures = 0
    with tempfile.TemporaryDirectory(prefix="checklist-") as folder:
        lines = list(checks(Runs(asked, Path(folder))))
        for title, check in track(lines, "training", console=console, transient=True):
            try:
                table.add_row(title, "[green]yes[/]", check())
            except FailedError as failure:
                failures += 1
                table.add_row(title, "[red]NO[/]", str(failure))
    console.print(table)
    console.print(f"{len(lines) - failures} of {len(lines)} verified in {time.perf_counter() - start_s:.0f} s")
    console.print(f"on {hardware()}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Asked, description=__doc__)))
