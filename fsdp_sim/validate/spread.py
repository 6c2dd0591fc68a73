"""`refit_spread`: how far a step time may lie from its prediction, for `fsdp_sim.cost.interval_s`.

Two parts. Fits as good as the best: numbers that are not fitted are held elsewhere and the others fitted again; where
the loss hardly grows the data cannot tell, and how far the predictions then lie apart on more distant requests (slow
networks, many nodes) is what they do not know. And the errors of rows that were left out, by where they belong; on
other stacks they grow with what kernels lose beside their work, by the most likely number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fsdp_sim.cost import Z80, Calibration, Shares, Spread, belongs_to, deviation
from fsdp_sim.validate.fitting import Array, FittedCalibration, Fitter
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
    shares = [prediction(row, best.calibration).uncertain_shares for row in every]
    x = np.array([[1.0, of.waiting, math.log2(r.cluster.nodes)] for r, of in zip(every, shares, strict=True)])
    before = np.log(predictor.step_times_s(best.calibration))
    slopes = []
    for member in members:
        if member.fit.loss <= AS_GOOD * best.loss:
            moved = np.log(predictor.step_times_s(member.fit.calibration)) - before
            slopes.append(np.linalg.lstsq(x, moved, rcond=None)[0])
    _, waiting, doubling = np.sqrt(np.mean(np.square(slopes), axis=0)).tolist()
    return {"waiting": waiting, "doubling": doubling}


class Miss(NamedTuple):
    """A row that was left out: how far its prediction was off, and what makes it uncertain."""

    row: PublishedRun
    log_error: float
    shares: Shares

    @property
    def belongs(self) -> str:
        return belongs_to(self.row.plan.stack, self.row.cluster.gpu)

    def half_width(self, spread: Spread) -> float:
        """Of the 80% interval, as a logarithm."""
        return Z80 * deviation(spread, self.belongs, self.row.cluster, self.shares)


def misses(held: Iterable[HeldOut]) -> list[Miss]:
    """Of the rows of groups that were left out."""
    found = []
    for h in held:
        for row, predicted in zip(h.rows, h.predicted_s, strict=True):
            shares = prediction(row, h.calibration).uncertain_shares
            found.append(Miss(row, math.log(predicted / (row.step_time_s or math.nan)), shares))
    return found


def gaps_of(spread: Spread, some: Sequence[Miss]) -> float:
    """``gaps`` of `Spread`: with a residual beside it, what makes the errors of other stacks most likely."""
    from scipy.optimize import minimize

    mine = [miss for miss in some if miss.belongs == "other_stacks"]

    def unlikely(logs: Array) -> float:
        residual, gaps = np.exp(logs)
        tried = spread._replace(gaps=gaps, residual={"other_stacks": residual})
        sigmas = np.array([miss.half_width(tried) / Z80 for miss in mine])
        return float(np.sum(np.log(sigmas) + (np.array([miss.log_error for miss in mine]) / sigmas) ** 2 / 2))

    found = minimize(unlikely, np.log([0.05, 0.5]), method="Nelder-Mead")
    return float(np.exp(found.x[1]))


def with_residuals(spread: Spread, some: Sequence[Miss]) -> Spread:
    """With the ``gaps`` that these rows make likely, and the residuals for which `SHARE` of them lie inside."""
    residual = {}
    if any(miss.belongs == "other_stacks" for miss in some):
        spread = spread._replace(gaps=gaps_of(spread, some))
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
    """Of each group of rows by where they belong: intervals from the errors of the other models (or sources)."""

    def group(miss: Miss) -> tuple[str, str]:
        return miss.belongs, GROUPS["model" if miss.belongs == "llm-foundry" else "source"](miss.row)

    found: dict[str, list[tuple[bool, float]]] = {}
    for mine in dict.fromkeys(map(group, some)):
        alike = [other for other in some if other.belongs == mine[0]]
        without = with_residuals(spread, [other for other in alike if group(other) != mine] or alike)
        for miss in (other for other in alike if group(other) == mine):
            half = miss.half_width(without)
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
    spread = Spread({}, **refit_spread(best, members, rows), between=between, gaps=0.0)
    return with_residuals(spread, some)
