"""`refit_all`: every fitted number anew, as the texts of the files of `fsdp_sim.cost` that hold them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fsdp_sim.cost import Calibration
from fsdp_sim.validate.leave_out import (
    FREE,
    OF_STACK,
    Progress,
    fitting_rows,
    leave_out,
    other_rows,
    refit,
    refit_elsewhere,
)
from fsdp_sim.validate.published import PublishedRun
from fsdp_sim.validate.spread import ensemble, misses, spread_of

HEAD = "# Written by `fsdp-sim validate --refit`; what each number means is in {module}."
FITTED_STACK = "llm-foundry"
# Not fitted: 2 to 5 us lie between kernels in traces of one H200 (docs/one_gpu.md); a loop that does nothing between
# two steps takes nothing there.
PLAIN = ("kernel_gap_s = 4e-06", "step_s = 0.0")


def refit_all(rows: Sequence[PublishedRun], progress: Progress = lambda what: None) -> dict[str, str]:
    """Fit the numbers, and how far predictions may be off; returns the text of each file by its name.

    Raises:
        ValueError: too few rows, or none of another stack.
    """
    chosen, others = fitting_rows(rows), other_rows(rows)
    fitter, best = refit(chosen, progress)
    elsewhere = refit_elsewhere(others, best.calibration, progress)[1].calibration
    held = leave_out(chosen, "model", progress)[1] + leave_out(others, "source", progress, best.calibration)[1]
    between = abs(math.log(elsewhere.step_s / best.calibration.step_s))
    spread = spread_of(best, ensemble(fitter), chosen, misses(held), between)
    calibration = [HEAD.format(module="calibration.py"), *_lines(elsewhere, FREE)]
    calibration += ["", "[stack.plain]", *PLAIN]
    calibration += ["", f"[stack.{FITTED_STACK}]", *_lines(best.calibration, OF_STACK)]
    numbers = {name: getattr(spread, name) for name in ("waiting", "between", "gaps", "doubling")}
    intervals = [HEAD.format(module="intervals.py"), *(f"{name} = {value:.3g}" for name, value in numbers.items())]
    intervals += ["", "[residual]", *(f"{name} = {value:.3g}" for name, value in spread.residual.items())]
    return {"calibration.toml": "\n".join(calibration) + "\n", "intervals.toml": "\n".join(intervals) + "\n"}


def _lines(calibration: Calibration, names: Iterable[str]) -> list[str]:
    return [f"{name} = {getattr(calibration, name):.4g}" for name in names]
