"""`Predictor`: predicts the step time of each published measurement from given numbers, quickly.

A fit asks for the same rows hundreds of times, so what does not depend on the numbers (the workload, the program) is
made once. And a step is periodic: every further layer and every further micro-batch costs the same. For a fit a row
is played with few layers and with one and two micro-batches, and the differences count for the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fsdp_sim.cost import Calibration
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Plan
from fsdp_sim.validate.errors import PredictedRow
from fsdp_sim.validate.published import PublishedRun

LAYERS = (2, 4)
MICRO_BATCHES = (1, 2)


def prediction(row: PublishedRun, calibration: Calibration | None = None) -> Simulation:
    """The simulation of a row: all its layers and micro-batches."""
    return simulate(row.model, row.cluster, plan_of(row), calibration=calibration)


def plan_of(row: PublishedRun) -> Plan:
    """The plan of a row.

    Where the source does not say whether activations were checkpointed, and the run would not fit without, they were.
    """
    if row.raw.get("activation_checkpointing") or row.plan.activation_checkpointing:
        return row.plan
    fits = simulate(row.model, row.cluster, row.plan).fits
    return row.plan if fits else replace(row.plan, activation_checkpointing="full")


def compare(row: PublishedRun, calibration: Calibration | None = None) -> PredictedRow:
    """A row beside its prediction."""
    return PredictedRow(row, prediction(row, calibration))


class Predictor:
    """Predicts the step times of some rows for many sets of numbers."""

    def __init__(self, rows: Sequence[PublishedRun]) -> None:
        self._simulations: dict[object, Simulation] = {}
        self._parts: list[list[tuple[float, object]]] = []  # of each row: simulations, and how often each counts
        for row in rows:
            of_row = plan_of(row)
            parts: list[tuple[float, object]] = []
            for layers, count in _shares(row.model.n_layer, LAYERS):
                for micro_batches, times in _shares(row.plan.grad_accum, MICRO_BATCHES):
                    model = replace(row.model, n_layer=layers)
                    plan = replace(of_row, grad_accum=micro_batches)
                    key = (model, row.cluster, plan)
                    if key not in self._simulations:
                        self._simulations[key] = simulate(model, row.cluster, plan)
                    parts.append((count * times, key))
            self._parts.append(parts)

    def step_times_s(self, calibration: Calibration, only: Sequence[int] | None = None) -> np.ndarray:
        """Predicted seconds of each row, of shape (rows,); of the rows ``only`` if given."""
        known: dict[object, float] = {}

        def seconds(key: object) -> float:
            if key not in known:
                known[key] = self._simulations[key].recalibrated(calibration).step_time_s
            return known[key]

        chosen = range(len(self._parts)) if only is None else only
        return np.array([sum(share * seconds(key) for share, key in self._parts[i]) for i in chosen])


def _shares(count: int, played: tuple[int, int]) -> list[tuple[int, float]]:
    """``t(count)`` from the two that are played, on a line: how often each counts."""
    few, more = played
    if count <= more:
        return [(count, 1.0)]
    slope = (count - few) / (more - few)
    return [(few, 1.0 - slope), (more, slope)]
