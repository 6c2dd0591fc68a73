"""Predict what precision, accumulation and clipping do to the numbers of a training, then measure it.

    python -m labs.lab.numerics                     four ranks, a small GPT
    python -m labs.lab.numerics --ranks 8 --steps 20

Exit status: 0 done, 1 a training failed, 2 asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import sys

import tyro

from labs.lab.command import command
from labs.lab.numerics import run


def main(ranks: int = 4, steps: int = 10) -> int:
    """The command; returns its exit status.

    Args:
        ranks: of the experiments on accumulation and clipping, at least 2 and dividing 128.
        steps: of the trainings.
    """
    return command("numerics", lambda: run(ranks, steps))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m labs.lab.numerics", description=__doc__))
