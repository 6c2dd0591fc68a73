"""`Search`: the fastest point of a space that fits, found with few looks.

Every look teaches. What a step takes and what memory it needs at points not seen yet is predicted from those that were,
by kriging (Krige 1951) with a correlation that falls by one factor for each lever that differs. Predictions choose what
to look at next; what is found has been looked at, and what is proven to be no better than the best has not. Nothing is
drawn at random.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from fsdp_sim.explore.space import Point, Space
from fsdp_sim.spec import Plan

ALIKE = 0.9  # correlation of two plans that differ in one lever
NOISE = 1e-6  # keeps the system of equations solvable where two points behave alike
AT_ONCE = 4  # predicted points that are looked at before predicting again
DOUBTFUL, SLACK = 2, 1.08  # of these so many that are predicted to fit a limit that is so much higher
FAR = 3  # levers in which a predicted point differs from the best, where there are too many points to predict all
TOGETHER = (
    "micro_batch",
    "activation_checkpointing",
)  # memory is a product of these: all pairs are looked at
MOST = 20_000  # points that are predicted at once


class Outcome(NamedTuple):
    """What a look tells: seconds of a GPU per token, and the bytes that have to fit."""

    seconds: float
    bytes: float


class Search:
    """A search that remembers what it has seen.

    Args:
        look: simulates a plan; None if it is impossible.
        bound: of a plan, what it takes at least; None if it is impossible.

    Attributes:
        seen: outcomes by plan.
    """

    def __init__(
        self, space: Space, look: Callable[[Plan], Outcome | None], bound: Callable[[Plan], Outcome | None]
    ) -> None:
        self.space = space
        self._look = look
        self._bound = functools.cache(bound)
        self.seen: dict[Plan, Outcome | None] = {}
        self._points: dict[Point, Outcome] = {}  # one for each plan that is possible

    def best(self, limit: float) -> Plan | None:
        """The fastest plan seen that fits, else the one that needs least memory; None if none is possible."""
        point = self._best(limit)
        return None if point is None else self.space.plan(point)

    def run(self, limit: float) -> None:
        """Look for the fastest plan that fits: near the best, then once more wherever a value had no chance."""
        names = list(self.space.levers)
        grid = [range(size if name in TOGETHER else 1) for name, size in zip(names, self.space.sizes, strict=True)]
        for point in itertools.product(*grid):
            self._try(point)
        self.settle(limit)
        self._give_each_value_a_chance(limit)
        self.settle(limit)

    def settle(self, limit: float) -> None:
        """Look until no neighbour of the best, and nothing that is predicted to be better, is better."""
        self._try(tuple(0 for _ in self.space.sizes))
        while (base := self._best(limit)) is not None:
            for point in self._near(base, 1):
                if self._may_be_better(self.space.plan(point), limit):
                    self._try(point)
            self.follow(limit)
            if self._best(limit) == base:
                return

    def follow(self, limit: float) -> None:
        """Look at what is predicted to be best, as long as that finds something better."""
        before = None
        while (best := self._best(limit)) is not None and best != before:
            before = best
            points = self._pool(best)
            predicted = self._predicted(points)
            chosen = self._first_new(points, _order(predicted, limit), limit, AT_ONCE)
            chosen |= self._first_new(points, _order(predicted, SLACK * limit), limit, DOUBTFUL, chosen)
            for point in chosen.values():
                self._try(point)

    def _give_each_value_a_chance(self, limit: float) -> None:
        """Of the plans with each value of each lever, look at the one that is predicted to be best."""
        best = self._best(limit)
        if best is None:
            return
        points = self._pool(best)
        predicted = self._predicted(points)
        order = _order(predicted, limit)
        for lever, size in enumerate(self.space.sizes):
            for value in range(size):
                first = next((n for n in order if points[n][lever] == value), None)
                if first is not None and self._may_be_better(self.space.plan(points[first]), limit):
                    self._try(points[first])

    def _try(self, point: Point) -> None:
        plan = self.space.plan(point)
        if plan is None or plan in self.seen:
            return
        outcome = self.seen[plan] = self._look(plan)
        if outcome is not None:
            self._points[point] = outcome

    def _may_be_better(self, plan: Plan | None, limit: float) -> bool:
        """Whether it is not proven that a plan is no better than the best, or impossible."""
        least, best = self._bound(plan) if plan is not None else None, self._best(limit)
        if least is None or best is None:
            return least is not None
        now = self._points[best]
        if now.bytes > limit:  # none fits yet: less memory is better
            return least.bytes < now.bytes
        return least.bytes <= limit and least.seconds < now.seconds

    def _best(self, limit: float) -> Point | None:
        def rank(point: Point) -> tuple[bool, float, float]:
            seconds, n_bytes = self._points[point]
            return (True, n_bytes, seconds) if n_bytes > limit else (False, seconds, n_bytes)

        return min(self._points, key=rank, default=None)

    def _near(self, base: Point, far: int) -> Iterator[Point]:
        """The points that differ from one in at most so many levers, those that differ least first."""
        others = [[v for v in range(size) if v != at] for size, at in zip(self.space.sizes, base, strict=True)]
        for differing in range(1, far + 1):
            for levers in itertools.combinations(range(len(base)), differing):
                for values in itertools.product(*(others[lever] for lever in levers)):
                    point = list(base)
                    for lever, value in zip(levers, values, strict=True):
                        point[lever] = value
                    yield tuple(point)

    def _pool(self, best: Point) -> list[Point]:
        """All points; where they are too many, those that differ in the first levers alone, and those near the best."""
        sizes, head, points = self.space.sizes, 0, 1
        while head < len(sizes) and points * sizes[head] <= MOST:
            points *= sizes[head]
            head += 1
        pool = [(*first, *best[head:]) for first in itertools.product(*map(range, sizes[:head]))]
        return pool if head == len(sizes) else list(dict.fromkeys([*pool, *self._near(best, FAR)]))

    def _first_new(
        self, points: list[Point], order: list[int], limit: float, count: int, beside: dict[Plan, Point] | None = None
    ) -> dict[Plan, Point]:
        """The first plans that were not seen yet, nor chosen, and that may be better than the best."""
        found: dict[Plan, Point] = {}
        for n in order:
            plan = self.space.plan(points[n])
            if plan not in (beside or {}) and plan not in self.seen and self._may_be_better(plan, limit):
                assert plan is not None
                found.setdefault(plan, points[n])
                if len(found) == count:
                    break
        return found

    def _predicted(self, points: list[Point]) -> Any:
        """Logarithms of seconds and bytes at each point, from all that were seen."""
        import numpy as np  # which only a search needs

        known = self._one_hot(list(self._points))
        values = np.log(np.array(list(self._points.values())))
        mean = values.mean(axis=0)
        weights = np.linalg.solve(self._alike(known, known) + NOISE * np.eye(len(known)), values - mean)
        return mean + self._alike(self._one_hot(points), known) @ weights

    def _alike(self, some: Any, others: Any) -> Any:
        return ALIKE ** (len(self.space.sizes) - some @ others.T)  # the product counts the levers that agree

    def _one_hot(self, points: list[Point]) -> Any:
        import numpy as np

        before = np.cumsum((0, *self.space.sizes[:-1]))
        marks = np.zeros((len(points), sum(self.space.sizes)))
        marks[np.arange(len(points))[:, None], np.array(points) + before] = 1.0
        return marks


def _order(predicted: Any, limit: float) -> list[int]:
    """Places from the most promising on: those predicted to fit, the fastest first, then the others, smallest first."""
    import numpy as np

    fits = predicted[:, 1] <= math.log(limit)
    fastest, smallest = (np.argsort(predicted[:, n], kind="stable") for n in (0, 1))
    return [int(n) for n in (*fastest[fits[fastest]], *smallest[~fits[smallest]])]
