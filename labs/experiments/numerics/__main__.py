"""Predict what precision, accumulation and clipping do to the numbers of a training, then measure it.

    python -m labs.experiments.numerics                     four ranks, a small GPT
    python -m labs.experiments.numerics --ranks 8 --steps 20

Exit status: 0 done, 1 a training failed, 2 asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Literal

import tyro

from labs.experiments.command import command
from labs.experiments.numerics import run


def main(ranks: int = 4, steps: int = 10, device: Literal["cpu", "cuda"] = "cpu") -> int:
    """The command; returns its exit status.

    Args:
        ranks: of the experiments on accumulation and clipping, at least 2 and dividing 128.
        steps: of the trainings.
        device: where the trainer runs; the other experiments are for CPU cores.
    """
    return command("numerics", lambda: run(ranks, steps, device))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m labs.experiments.numerics", description=__doc__))
