"""`leave_out`: does the model predict what it was not fitted to? Each group of runs from the numbers of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp_sim.cost import Calibration
from fsdp_sim.validate.errors import Summary, summary
from fsdp_sim.validate.fitting import FREE, Fit, Fitter
from fsdp_sim.validate.published import FITTED_SOURCE, PublishedRun

GROUPS: dict[str, Callable[[PublishedRun], str]] = {
    "model": lambda row: row.model.name,
    "gpu_type": lambda row: row.cluster.gpu.name,
    "n_gpus": lambda row: str(row.cluster.gpus),
}

ORDER: dict[str, Callable[[PublishedRun], float]] = {  # of the groups, when they are listed
    "model": lambda row: row.model.param_count,
    "gpu_type": lambda row: row.cluster.gpu.mem_bytes_per_s,
    "n_gpus": lambda row: row.cluster.gpus,
}


@dataclass(frozen=True)
class HeldOut:
    """One group, predicted by numbers fitted without it.

    Attributes:
        rows: of the group.
        predicted_s: their step times.
        calibration: the numbers fitted to the other groups.
    """

    group: str
    rows: Sequence[PublishedRun]
    predicted_s: Sequence[float]
    calibration: Calibration

    @property
    def errors(self) -> list[float]:
        return [p / r.step_time_s - 1 for p, r in zip(self.predicted_s, self.rows, strict=True) if r.step_time_s]

    @property
    def summary(self) -> Summary:
        return summary(self.errors)


def fitting_rows(rows: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The rows that numbers are fitted to: those of llm-foundry, or, where there are none, all that are plain FSDP."""
    timed = [row for row in rows if row.step_time_s is not None]
    return [r for r in timed if r.source == FITTED_SOURCE] or [r for r in timed if not r.remark]


def refit(rows: Sequence[PublishedRun], progress: Callable[[str], None] = lambda what: None) -> tuple[Fitter, Fit]:
    """Fit the numbers to all rows.

    Raises:
        ValueError: too few rows for the numbers that are fitted.
    """
    if len(rows) < 2 * len(FREE):
        raise ValueError(
            f"{len(rows)} rows have a step time; fitting {len(FREE)} numbers needs at least {2 * len(FREE)} "
            f"(without --leave-out or --refit, a file of any length can be validated)"
        )
    fitter = Fitter(rows, progress=progress)
    return fitter, fitter.fit()


def leave_out(
    rows: Sequence[PublishedRun], by: str, progress: Callable[[str], None] = lambda what: None
) -> tuple[Fit, list[HeldOut]]:
    """Fit to all rows, then again without each group; predict the group that was left out.

    Args:
        rows: with step times.
        by: ``model``, ``gpu_type`` or ``n_gpus``.
        progress: called after each evaluation, with what is being done.

    Raises:
        ValueError: an unknown ``by``, fewer than two groups, or too few rows.
    """
    if by not in GROUPS:
        raise ValueError(f"leave out {by!r}: it must be one of {', '.join(GROUPS)}")
    names = [GROUPS[by](row) for row in rows]
    size = ORDER[by]
    ordered = sorted((size(row), name) for row, name in zip(rows, names, strict=True))
    groups = list(dict.fromkeys(name for _, name in ordered))
    if len(groups) < 2:
        raise ValueError(
            f"all {len(rows)} rows have the same {by} ({groups[0] if groups else 'none'}); nothing to leave out"
        )
    fitter, fit = refit(rows, progress)
    held = []
    for name in groups:
        mine = [i for i, other in enumerate(names) if other == name]
        calibration = fitter.without(mine, fit)
        predicted = fitter.predictor.step_times_s(calibration, mine)
        held.append(HeldOut(name, [rows[i] for i in mine], np.asarray(predicted).tolist(), calibration))
    return fit, held
