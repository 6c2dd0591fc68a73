"""`least_squares_above_zero`: numbers that are not negative, fitted to measured times by their relative error."""

from __future__ import annotations

import itertools

import numpy as np

MOST = 4.0  # how far off a fit may be, as a factor, before it says nothing about the machine


def least_squares_above_zero(matrix: np.ndarray, right: np.ndarray, first_needed: int) -> np.ndarray:
    """The x >= 0 that brings ``matrix @ x`` nearest to ``right``, relative to what it makes of it.

    Every choice of which of the first columns to leave out is tried; those from ``first_needed`` on have to be above 0.

    Raises:
        ValueError: there is no such x, or it is off by a factor of `MOST`.
    """
    columns = matrix.shape[1]
    needed = tuple(range(first_needed, columns))
    best, best_error = None, np.inf
    for count in range(first_needed + 1):
        for extra in itertools.combinations(range(first_needed), count):
            chosen, x, weight = [*extra, *needed], np.zeros(columns), 1 / right
            for _ in range(20):  # relative to the fit, not to the noisy measurement, which would favour fits too low
                x[chosen] = np.linalg.lstsq(matrix[:, chosen] * weight[:, None], right * weight, rcond=None)[0]
                if x[chosen].min() <= 0:
                    break
                weight = 1 / (matrix @ x)
            else:
                error = float(np.sqrt(np.mean(np.log(matrix @ x / right) ** 2)))
                if error < best_error:
                    best, best_error = x, error
    if best is None or best_error > np.log(MOST):
        raise ValueError(
            "the measured times fit no link and no rate, such as less time for more bytes; measure on an idle machine"
        )
    return best


def rounded(value: float) -> float:
    """Three digits: more is noise, and the file is read by people."""
    return float(f"{value:.3g}")
