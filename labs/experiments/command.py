"""A lab as a command: what it prints, and its exit status."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from fsdp_sim.ranks import RanksError
from labs.cluster.torchrun import FailedError
from labs.experiments.result import LabResult


def command(lab: str, run: Callable[[], LabResult], closing: Callable[[LabResult], str] | None = None) -> int:
    """Run a lab, and print its table and its notes, or in one line what went wrong.

    Args:
        lab: its name, as in ``memory``.
        closing: a last line about the result.

    Returns:
        the exit status: 0 done, 1 a training or a rank failed, 2 asked wrongly, 130 Ctrl-C.
    """
    console = Console()
    try:
        result = run()
    except (ValueError, FailedError, RanksError) as error:
        console.print(f"labs.experiments.{lab}: {error}", markup=False, soft_wrap=True)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        return 130
    result.print(console)
    if closing is not None:
        console.print(closing(result))
    return 0
