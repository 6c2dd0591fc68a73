"""`Fitter`: the few numbers of `Calibration`, from published step times.

Each number is positive, so its logarithm is fitted; an error is the logarithm of predicted over measured step time. A
soft-L1 loss keeps a row that is far off from pulling the rest (Huber 1964), every model (or source) weighs the same
however often it was measured, and a weak prior holds each number near where it begins: numbers that the measurements
hardly tell apart would run away without one, and a model left out be predicted badly.

The slopes of the logarithms hardly change with the numbers, so they are taken once and used for every group left out
(the chord method); only the errors are computed anew in each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fsdp_sim.cost import Calibration
from fsdp_sim.packages import need
from fsdp_sim.validate.predict import Predictor
from fsdp_sim.validate.published import PublishedRun

Array = NDArray[np.float64]
Group = Callable[[PublishedRun], str]
PRIOR = 0.1  # what being wrong by a factor of e costs a number, where 1 is a row wrong by a factor of e
SOFT = 0.03  # errors above this count less than their square
ROUNDS = 8
CLOSE = 2e-3  # a fit is done when no number moves by more than this fraction
STEP = 0.05


@dataclass(frozen=True)
class FittedCalibration:
    """Fitted numbers.

    Attributes:
        slopes: of the log step time of each row with each number's logarithm, shape (rows, numbers).
        loss: of the rows, without the prior.
    """

    calibration: Calibration
    slopes: Array
    loss: float


class Fitter:
    """Fits the numbers to some rows, then again with a group of them left out.

    Args:
        rows: measurements with a step time.
        free: names of the numbers to fit; the others stay as ``start`` has them.
        start: where to begin, and where the prior holds them.
        group: rows of one group weigh together as much as those of any other.
        progress: called after each evaluation of all rows.
        predictor: of the rows, where there is one.
    """

    def __init__(
        self,
        rows: Sequence[PublishedRun],
        free: Sequence[str],
        start: Calibration,
        group: Group = lambda row: row.model.name,
        progress: Callable[[str], None] = lambda what: None,
        predictor: Predictor | None = None,
    ) -> None:
        need("fitting to measurements", "scipy")
        self.rows = rows
        self.free = tuple(free)
        self.start = start
        self.group = group
        self.prior = np.log([getattr(self.start, name) for name in self.free])
        self.log_measured = np.log([row.step_time_s or np.nan for row in rows])
        self.predictor = predictor or Predictor(rows)
        self.progress = progress

    def calibration(self, logs: Array) -> Calibration:
        return replace(self.start, **dict(zip(self.free, np.exp(logs).tolist(), strict=True)))

    def errors(self, logs: Array, use: Sequence[int] | None = None) -> Array:
        """Log of predicted over measured, of shape (rows,)."""
        predicted = self.predictor.step_times_s(self.calibration(logs), use)
        self.progress("played")
        return np.log(predicted) - (self.log_measured if use is None else self.log_measured[list(use)])

    def slopes(self, logs: Array, errors: Array) -> Array:
        """Slopes of the errors, of shape (rows, numbers)."""
        columns = []
        for k in range(len(logs)):
            moved = logs.copy()
            moved[k] += STEP
            columns.append((self.errors(moved) - errors) / STEP)
        return np.stack(columns, axis=1)

    def fit(self) -> FittedCalibration:
        """Fit to all rows. The slopes are taken at the start and once more where that leads."""
        logs, every = self.prior, range(len(self.rows))
        for _ in range(2):
            slopes = self.slopes(logs, self.errors(logs))
            logs = self._descend(logs, slopes, every)
        z = (self.weights(every) * self.errors(logs) / SOFT) ** 2
        return FittedCalibration(self.calibration(logs), slopes, float(np.sum(2 * SOFT**2 * (np.sqrt(1 + z) - 1))))

    def without(self, left_out: Sequence[int], of: FittedCalibration) -> Calibration:
        """Fit to the rows that are not left out, starting from the fit to all."""
        gone = set(left_out)
        use = [i for i in range(len(self.rows)) if i not in gone]
        start = np.log([getattr(of.calibration, name) for name in self.free])
        return self.calibration(self._descend(start, of.slopes, use))

    def weights(self, use: Sequence[int]) -> Array:
        """Weights that make the groups count the same, with mean square 1."""
        groups = [self.group(self.rows[i]) for i in use]
        weights = np.array([groups.count(group) ** -0.5 for group in groups])
        return np.asarray(weights / np.sqrt(np.mean(weights**2)))

    def _descend(self, logs: Array, slopes: Array, use: Sequence[int]) -> Array:
        from scipy.optimize import least_squares

        slopes = slopes[list(use)]
        weights = self.weights(use)

        def move(errors: Array, logs: Array) -> Array:
            def residuals(by: Array) -> Array:
                return np.concatenate([weights * (errors + slopes @ by), PRIOR * (logs + by - self.prior)])

            found = least_squares(residuals, np.zeros_like(logs), loss="soft_l1", f_scale=SOFT)
            return np.asarray(found.x)

        for _ in range(ROUNDS):
            by = move(self.errors(logs, use), logs)
            logs = logs + np.clip(by, -0.7, 0.7)
            if np.abs(by).max() < CLOSE:
                break
        return logs
