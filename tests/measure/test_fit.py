"""Least squares of the relative error, of what cannot be negative."""

import numpy as np
import pytest

from fsdp_sim.measure.fit import least_squares_above_zero


def test_least_squares_leaves_out_what_would_be_negative():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    # An intercept of -0.5 fits exactly; the best one that is not negative is 0.
    assert least_squares_above_zero(matrix, np.array([0.5, 1.5, 2.5]), 1)[0] == 0.0


def test_a_small_time_counts_as_much_as_a_large_one():
    matrix = np.array([[1.0, 1e-3], [1.0, 1e3]])
    x = least_squares_above_zero(np.vstack([matrix, matrix]), np.array([1e-3, 2.0, 1.1e-3, 2.2]), 1)
    assert matrix @ x == pytest.approx([1.05e-3, 2.1], rel=0.01)


def test_times_that_nothing_makes_are_refused():
    with pytest.raises(ValueError, match="measure on an idle machine"):
        least_squares_above_zero(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([1.0, 1e-9]), 1)
