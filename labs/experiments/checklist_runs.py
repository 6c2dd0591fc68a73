"""The runs of the checklist: trained once per setting under torchrun, and their numbers compared."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import torch

from labs.cluster.torchrun import FailedError, TrainingRun, train

CLOSE = 1e-5
"""Relative: other ranks and other APIs add the same numbers in another order."""


@dataclasses.dataclass(frozen=True)
class ChecklistOptions:
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


class Runs:
    """Trains on demand, each setting once."""

    def __init__(self, options: ChecklistOptions, folder: Path) -> None:
        self.options, self.folder = options, folder
        self._done: dict[tuple[Any, ...], TrainingRun | FailedError] = {}

    def run(self, ranks: int, *arguments: str) -> TrainingRun:
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

    def gone_on(self, step: int, ranks: int, other_ranks: int, *arguments: str) -> TrainingRun:
        """A run that goes on in a copy of what ``ranks`` left behind when they stopped after ``step`` steps."""
        stopped = self.run(ranks, f"--steps={step}")
        out = self.folder / f"copy-for-{other_ranks}"
        shutil.copytree(stopped.out, out)
        return self.again(out, other_ranks, *arguments)

    def again(self, out: Path, ranks: int, *arguments: str) -> TrainingRun:
        options = self.options
        settings = [
            f"--model={options.model}", f"--global_batch={options.rows}", f"--seq_len={options.seq_len}",
            f"--steps={options.steps}",
        ]  # fmt: skip
        if options.device == "cuda":  # where attention's backward adds in any order
            settings.append("--deterministic=true")
        return train(*settings, *arguments, ranks=ranks, device=options.device, out=out, progress=False)


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
