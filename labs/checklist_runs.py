"""The runs of the checklist: trained once per setting under torchrun, and their numbers compared."""

from __future__ import annotations

import dataclasses
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

from labs.place import n_ranks

CLOSE = 1e-5
"""Relative: other ranks and other APIs add the same numbers in another order."""


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

    @property
    def device(self) -> str:
        """One for all runs, so that they can be compared."""
        return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= max(self.ranks) else "cpu"

    def check(self) -> None:
        """Raises ValueError for numbers that cannot be."""
        if min(self.ranks, default=0) < 1:
            raise ValueError(f"ranks={' '.join(map(str, self.ranks))}: give one number or more, at least 1 each")
        for ranks in self.ranks:
            if self.rows % ranks or self.rows < 1:
                raise ValueError(
                    f"rows={self.rows} does not divide into {ranks} ranks; use --rows {math.lcm(*self.ranks)}"
                )
        if self.steps < 2:
            raise ValueError(f"steps={self.steps}: a run is stopped halfway and gone on with; use --steps 2 or more")


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
        self._done: dict[tuple[Any, ...], Trained | FailedError] = {}

    def run(self, ranks: int, *arguments: str) -> Trained:
        """Raises FailedError, each time it is asked for, when the run failed."""
        key = (ranks, *arguments)
        if key not in self._done:
            try:
                self._done[key] = self.again(self.folder / f"run-{len(self._done)}", ranks, *arguments)
            except FailedError as failure:
                self._done[key] = failure
        done = self._done[key]
        if isinstance(done, FailedError):
            raise done
        return done

    def again(self, out: Path, ranks: int, *arguments: str) -> Trained:
        asked = self.asked
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m",
            "labs.train", f"--model={asked.model}", f"--global_batch={asked.rows}", f"--seq_len={asked.seq_len}",
            f"--steps={asked.steps}", f"--device={asked.device}", f"--out={out}", *arguments,
        ]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"} | os.environ, check=False
        )
        what = f"labs.train on {n_ranks(ranks)} {' '.join(arguments)}".strip()
        if done.returncode:
            raise FailedError(f"{what} ended with status {done.returncode}: {what_it_said(done.stderr)}")
        try:
            lines = [msgspec.json.decode(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
            losses, norms = ([_number(line[key]) for line in lines if "loss" in line] for key in ("loss", "grad_norm"))
            report = msgspec.json.decode((out / "report.json").read_bytes())
        except (OSError, KeyError, msgspec.DecodeError) as error:
            raise FailedError(f"{what} ended well, but its numbers cannot be read: {error!r}") from error
        return Trained(losses, norms, report, out)


def what_it_said(stderr: str) -> str:
    """Of all that torchrun prints the trainer's own words, else the end."""
    said = [line.removeprefix("labs.train: ") for line in stderr.splitlines() if line.startswith("labs.train: ")]
    return said[0] if said else stderr.strip()[-500:]


def _number(value: float | None) -> float:
    """metrics.jsonl has null for what is not finite."""
    return math.nan if value is None else value


def off(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    if len(a) != len(b):
        raise FailedError(f"{len(a)} steps and {len(b)}")
    return max((math.inf if math.isnan(x - y) else abs(x - y) / abs(y)) for x, y in zip(a, b, strict=True))


def same(what: str, a: list[float], b: list[float], tolerance: float = CLOSE) -> str:
    """That ``a`` is ``what``, which is ``b``."""
    worst = off(a, b)
    if not worst <= tolerance:
        raise FailedError(f"not {what}: they differ by {worst:.1e}, more than {tolerance:g}")
    return f"{what}, to {worst:.0e}" if worst else f"{what}, bit for bit"


def falls(losses: list[float]) -> str:
    if not losses[-1] < losses[0]:
        raise FailedError(f"the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
