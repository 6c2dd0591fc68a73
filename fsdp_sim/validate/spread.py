"""`refit_spread`: how far a step time may lie from its prediction, for `fsdp_sim.cost.interval_s`.

Two parts. Fits as good as the best: numbers that are not fitted are held elsewhere and the others fitted again; where
the loss hardly grows the data cannot tell, and how far the predictions then lie apart on more distant requests (slow
networks, many nodes) is what they do not know. And the errors of rows that were left out, by where they belong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fsdp_sim.cost import Z80, Calibration, Spread, belongs_to, deviation
from fsdp_sim.simulation import Simulation
from fsdp_sim.validate.fitting import FittedCalibration, Fitter
from fsdp_sim.validate.leave_out import FREE, GROUPS, HeldOut
from fsdp_sim.validate.predict import Predictor, prediction
from fsdp_sim.validate.published import PublishedRun

HELD = {  # numbers that are not fitted, and where else they are held
    "contention": (0.0, 2.0), "link_fraction": (0.7, 1.3), "eager_bytes": (0.7, 1.5), "matmul_ramp_k": (220.0, 480.0),
}  # fmt: skip
AS_GOOD = 1.05  # a loss up to this many times the best
SLOW_NETWORK = "Ethernet 100Gb per node"
SHARE = 0.80  # of the rows that are left out lie inside
LEAST, MOST = 1e-3, 2.0  # of a residual


class Member(NamedTuple):
    """A fit with one number held elsewhere."""

    name: str
    value: float
    fit: FittedCalibration


def ensemble(best: Fitter) -> list[Member]:
    """The fits with each number of `HELD` held at its other values."""
    found = []
    for name, values in HELD.items():
        for value in values:
            start = replace(Calibration(), **{name: value})
            fitter = Fitter(best.rows, FREE, start, best.group, best.progress, best.predictor)
            found.append(Member(name, value, fitter.fit()))
    return found


def refit_spread(best: FittedCalibration, members: Sequence[Member], rows: Sequence[PublishedRun]) -> dict[str, float]:
    """``waiting`` and ``doubling`` of `Spread`: how far fits as good as the best lie apart, per share and doubling."""
    far = [replace(r, cluster=replace(r.cluster, inter=SLOW_NETWORK)) for r in rows if r.cluster.nodes > 1]
    every = [*rows, *far]
    predictor = Predictor(every)
    shares = [shares_of(prediction(row, best.calibration)) for row in every]
    x = np.array([[1.0, waiting, math.log2(r.cluster.nodes)] for r, (waiting, _) in zip(every, shares, strict=True)])
    before = np.log(predictor.step_times_s(best.calibration))
    slopes = []
    for member in members:
        if member.fit.loss <= AS_GOOD * best.loss:
            moved = np.log(predictor.step_times_s(member.fit.calibration)) - before
            slopes.append(np.linalg.lstsq(x, moved, rcond=None)[0])
    _, waiting, doubling = np.sqrt(np.mean(np.square(slopes), axis=0)).tolist()
    return {"waiting": waiting, "doubling": doubling}


def shares_of(sim: Simulation) -> tuple[float, float]:
    """Shares of a step in which compute waits, and between two steps."""
    between_s = sim.between_steps_s
    waiting_s = sim.step_time_s - between_s - sim.exposure.compute_s
    return max(0.0, waiting_s / sim.step_time_s), between_s / sim.step_time_s


class Miss(NamedTuple):
    """A row that was left out: how far its prediction was off, and what makes it uncertain."""

    row: PublishedRun
    log_error: float
    waiting: float
    between: float

    @property
    def belongs(self) -> str:
        return belongs_to(self.row.plan.stack, self.row.cluster.gpu)

    def half_width(self, spread: Spread) -> float:
        """Of the 80% interval, as a logarithm."""
        return Z80 * deviation(spread, self.belongs, self.row.cluster, self.waiting, self.between)


def misses(held: Iterable[HeldOut]) -> list[Miss]:
    """Of the rows of groups that were left out."""
    found = []
    for h in held:
        for row, predicted in zip(h.rows, h.predicted_s, strict=True):
            shares = shares_of(prediction(row, h.calibration))
            found.append(Miss(row, math.log(predicted / (row.step_time_s or math.nan)), *shares))
    return found


def with_residuals(spread: Spread, some: Sequence[Miss]) -> Spread:
    """With the residuals for which `SHARE` of these rows lie inside their interval."""
    residual = {}
    for name in sorted({miss.belongs for miss in some}):
        mine = [miss for miss in some if miss.belongs == name]
        low, high = LEAST, MOST
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            inside = share_inside(spread._replace(residual={name: middle}), mine)
            low, high = (low, middle) if inside >= SHARE else (middle, high)
        residual[name] = high
    return spread._replace(residual=residual)


def share_inside(spread: Spread, some: Sequence[Miss]) -> float:
    """The share of rows in their interval; on other stacks each source weighs the same: who asks is one more."""
    inside: dict[str, list[bool]] = {}
    for miss in some:
        source = GROUPS["source"](miss.row) if miss.belongs == "other_stacks" else ""
        inside.setdefault(source, []).append(abs(miss.log_error) <= miss.half_width(spread))
    return sum(sum(of) / len(of) for of in inside.values()) / len(inside)


class Coverage(NamedTuple):
    """How the intervals of rows do that had no part in them.

    Attributes:
        inside: share of the rows that lie in their interval.
        half_width: the median, as a fraction.
    """

    belongs: str
    rows: int
    inside: float
    half_width: float


def coverages(spread: Spread, some: Sequence[Miss]) -> list[Coverage]:
    """Of each group of rows by where they belong: intervals from the residuals of the other models (or sources)."""
    found: dict[str, list[tuple[bool, float]]] = {}
    for miss in some:
        by = GROUPS["model" if miss.belongs == "llm-foundry" else "source"]
        alike = [other for other in some if other.belongs == miss.belongs]
        rest = [other for other in alike if by(other.row) != by(miss.row)] or alike
        half = miss.half_width(with_residuals(spread, rest))
        found.setdefault(miss.belongs, []).append((abs(miss.log_error) <= half, half))
    return [
        Coverage(name, len(rows), sum(ok for ok, _ in rows) / len(rows), float(np.median([h for _, h in rows])))
        for name, rows in found.items()
    ]


def spread_of(
    best: FittedCalibration,
    members: Sequence[Member],
    rows: Sequence[PublishedRun],
    some: Sequence[Miss],
    between: float,
) -> Spread:
    """All of it. ``between``: how far apart the stacks are that were fitted, in the logarithm of their ``step_s``."""
    spread = Spread({}, **refit_spread(best, members, rows), between=between)
    return with_residuals(spread, some)
