"""Predicted against measured: the error of each row, and the three numbers that sum them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from fsdp_sim.simulation import Simulation
from fsdp_sim.validate.published import PublishedRun


@dataclass(frozen=True)
class PredictedRow:
    """A measured row and its prediction, each number when it is asked for: whether it fits takes longest.

    An error is None where the source has no number.
    """

    row: PublishedRun
    simulation: Simulation

    @property
    def predicted_step_time_s(self) -> float:
        return self.simulation.step_time_s

    @property
    def predicted_peak_memory_bytes(self) -> float:
        """In the source's own kind: what the allocator reserved, or what was alive."""
        memory = self.simulation.memory
        return float(memory.reserved_bytes if self.row.peak_memory_kind == "reserved" else memory.peak_bytes)

    @property
    def fits(self) -> bool:
        return self.simulation.fits

    @property
    def time_error(self) -> float | None:
        """Predicted over measured, less 1."""
        return _error(self.predicted_step_time_s, self.row.step_time_s)

    @property
    def memory_error(self) -> float | None:
        return _error(self.predicted_peak_memory_bytes, self.row.peak_memory_bytes)

    def as_json(self) -> dict[str, object]:
        """The row as `fsdp-sim validate --json` prints it."""
        measured = self.row.peak_memory_bytes
        return {
            "id": self.row.id,
            "step_time_s": self.row.step_time_s,
            "predicted_step_time_s": self.predicted_step_time_s,
            "peak_memory_GiB": None if measured is None else measured / 2**30,
            "predicted_peak_memory_GiB": self.predicted_peak_memory_bytes / 2**30,
            "fits": self.fits,
            "source": self.row.source,
            "remark": self.row.remark,
        }


@dataclass(frozen=True)
class Summary:
    """Absolute errors as fractions; not a number where there is no row."""

    n: int
    mape: float
    median_abs_error: float
    p90_abs_error: float

    def as_json(self) -> dict[str, float | int | None]:
        return {name: None if value != value else value for name, value in asdict(self).items()}


def summary(errors: Iterable[float | None]) -> Summary:
    """Mean, median and 90th percentile of the absolute errors; blanks do not count.

    Example:
        >>> summary([0.1, -0.2, None])
        Summary(n=2, mape=0.15, median_abs_error=0.15, p90_abs_error=0.19)
    """
    sizes = np.abs([e for e in errors if e is not None])
    if not len(sizes):
        return Summary(0, np.nan, np.nan, np.nan)
    three = (np.mean(sizes), np.median(sizes), np.quantile(sizes, 0.9))
    return Summary(len(sizes), *(round(float(value), 6) for value in three))


def summaries(compared: Sequence[PredictedRow]) -> dict[str, dict[str, object]]:
    """The summary of times and of memory."""
    return {
        "time": summary(c.time_error for c in compared).as_json(),  # type: ignore[dict-item]
        "memory": summary(c.memory_error for c in compared).as_json(),  # type: ignore[dict-item]
    }


def group_by(compared: Sequence[PredictedRow], group: Callable[[PublishedRun], str]) -> dict[str, list[PredictedRow]]:
    """The rows of each group, in order."""
    groups: dict[str, list[PredictedRow]] = {}
    for c in compared:
        groups.setdefault(group(c.row), []).append(c)
    return groups


def _error(predicted: float, measured: float | None) -> float | None:
    return None if measured is None else predicted / measured - 1.0
