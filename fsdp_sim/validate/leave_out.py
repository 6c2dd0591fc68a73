"""`leave_out`: does the model predict what it was not fitted to? Each group of runs from the numbers of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fsdp_sim.cost import Calibration, fitted, rates_are_known
from fsdp_sim.validate.errors import Summary, summary
from fsdp_sim.validate.fitting import FittedCalibration, Fitter
from fsdp_sim.validate.predict import Predictor
from fsdp_sim.validate.published import FITTED_SOURCE, PublishedRun

GROUPS: dict[str, Callable[[PublishedRun], str]] = {
    "model": lambda row: row.model.name,
    "gpu_type": lambda row: row.cluster.gpu.name,
    "n_gpus": lambda row: str(row.cluster.gpus),
    "source": lambda row: row.source.split(" ")[0],
}

ORDER: dict[str, Callable[[PublishedRun], float]] = {  # of the groups, when they are listed
    "model": lambda row: row.model.param_count,
    "gpu_type": lambda row: row.cluster.gpu.mem_bytes_per_s,
    "n_gpus": lambda row: row.cluster.gpus,
    "source": lambda row: 0.0,
}

FREE = (  # of the hardware, and of llm-foundry's stack
    "matmul_fraction", "attention_fraction_hopper", "attention_backward_flash1",
    "slowest_per_doubling", "kernel_gap_s", "step_s",
)  # fmt: skip
OF_STACK = ("step_s",)  # what a stack has its own of; all but llm-foundry share theirs
Progress = Callable[[str], None]


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
    """The rows that the hardware's numbers are fitted to: llm-foundry's, or, where there are none, all plain FSDP."""
    timed = [row for row in rows if row.step_time_s is not None]
    return [r for r in timed if r.source == FITTED_SOURCE] or [r for r in timed if not r.remark]


def other_rows(rows: Sequence[PublishedRun]) -> list[PublishedRun]:
    """The rows of other stacks with a step time."""
    return [row for row in rows if row.step_time_s is not None and row.source != FITTED_SOURCE]


def refit(rows: Sequence[PublishedRun], progress: Progress = lambda what: None) -> tuple[Fitter, FittedCalibration]:
    """Fit the hardware's numbers, and those of llm-foundry's stack, to all rows.

    Raises:
        ValueError: too few rows for the numbers that are fitted.
    """
    _check_number(rows, FREE)
    fitter = Fitter(rows, FREE, Calibration(), progress=progress)
    return fitter, fitter.fit()


def refit_elsewhere(
    rows: Sequence[PublishedRun], hardware: Calibration, progress: Progress = lambda what: None
) -> tuple[Fitter, FittedCalibration]:
    """Fit the numbers of all other stacks to those of their runs with FSDP on GPUs whose rates are fitted.

    Raises:
        ValueError: too few rows for the numbers that are fitted.
    """
    known = [row for row in rows if rates_are_known(row.cluster.gpu) and row.plan.api.startswith("fsdp")]
    _check_number(known, OF_STACK)
    start = replace(hardware, **{name: getattr(Calibration(), name) for name in OF_STACK})
    fitter = Fitter(known, OF_STACK, start, GROUPS["source"], progress)
    return fitter, fitter.fit()


def _check_number(rows: Sequence[PublishedRun], free: Sequence[str]) -> None:
    if len(rows) < 2 * len(free):
        raise ValueError(
            f"{len(rows)} rows have a step time; fitting {len(free)} numbers needs at least {2 * len(free)} "
            f"(without --leave-out or --refit, a file of any length can be validated)"
        )


def leave_out(
    rows: Sequence[PublishedRun],
    by: str,
    progress: Progress = lambda what: None,
    hardware: Calibration | None = None,
) -> tuple[FittedCalibration, list[HeldOut]]:
    """Fit to all rows, then again without each group; predict the group that was left out.

    Args:
        rows: with step times; for ``source`` those of other stacks, elsewhere those of one stack.
        by: ``model``, ``gpu_type``, ``n_gpus`` or ``source``.
        progress: called after each evaluation, with what is being done.
        hardware: for ``source``, the numbers of the hardware; by default those of the file.

    Raises:
        ValueError: an unknown ``by``, fewer than two groups, or too few rows.
    """
    if by not in GROUPS:
        raise ValueError(f"leave out {by!r}: it must be one of {', '.join(GROUPS)}")
    names = [GROUPS[by](row) for row in rows]
    ordered = sorted((ORDER[by](row), name) for row, name in zip(rows, names, strict=True))
    groups = list(dict.fromkeys(name for _, name in ordered))
    if len(groups) < 2:
        raise ValueError(
            f"all {len(rows)} rows have the same {by} ({groups[0] if groups else 'none'}); nothing to leave out"
        )
    fitter, fit = refit_elsewhere(rows, hardware or fitted(), progress) if by == "source" else refit(rows, progress)
    predictor = fitter.predictor if len(fitter.rows) == len(rows) else Predictor(rows)
    held = []
    for name in groups:
        calibration = fitter.without([i for i, row in enumerate(fitter.rows) if GROUPS[by](row) == name], fit)
        mine = [i for i, other in enumerate(names) if other == name]
        predicted = predictor.step_times_s(calibration, mine)
        held.append(HeldOut(name, [rows[i] for i in mine], predicted.tolist(), calibration))
    return fit, held
