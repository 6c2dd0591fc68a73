"""Predict what precision, accumulation and clipping do to the numbers of a training, then measure it.

    python -m labs.lab.numerics                     four ranks, a small GPT
    python -m labs.lab.numerics --ranks 8 --steps 20

Exit status: 0 done, 1 a training failed, 2 asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import sys

import tyro
from rich.console import Console

from labs.lab.numerics import run
from labs.trained import FailedError


def main(ranks: int = 4, steps: int = 10) -> int:
    """Predict and measure; prints one table.

    Args:
        ranks: of the experiments on accumulation and clipping, at least 2 and dividing 128.
        steps: of the trainings.
    """
    if ranks < 2 or 128 % ranks or steps < 1:
        print(f"labs.lab.numerics: ranks={ranks}, steps={steps}: ranks is 2, 4, 8, ... up to 64, and steps at least 1",
              file=sys.stderr)  # fmt: skip
        return 2
    try:
        result = run(ranks, steps)
    except FailedError as failure:
        print(f"labs.lab.numerics: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    result.print(Console())
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
