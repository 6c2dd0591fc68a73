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
SLACK = 1.08  # memory is predicted in doubt: beside the best for the limit, the best for one that is so much higher
SLOWER = 1.07  # times the best's time: what is predicted to take longer is not worth a look
FAR = 3  # levers in which a predicted point differs from the best, where there are too many points to predict all
TOGETHER = (
    "micro_batch",
    "activation_checkpointing",
)  # memory is a product of these: all pairs that may be better are looked at
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
            if self._may_be_better(self.space.plan(point), limit):
                self._try(point)
        self.settle(limit)
        self._give_each_value_a_chance(limit)
        self.settle(limit)

    def settle(self, limit: float) -> None:
        """Look until no neighbour of the best that is worth a look, and nothing predicted to be better, is better."""
        self._try(tuple(0 for _ in self.space.sizes))
        while (base := self._best(limit)) is not None:
            for point in self._worth_a_look(list(self._near(base, 1)), limit):
                if self._may_be_better(self.space.plan(point), limit):
                    self._try(point)
            self.follow(limit)
            if self._best(limit) == base:
                return

    def follow(self, limit: float, patience: int = 1) -> None:
        """Look at what is predicted to be best, until that finds nothing better, so many times in a row."""
        missed = 0
        while (best := self._best(limit)) is not None and missed < patience:
            points = self._pool(best)
            predicted = self._predicted(points)
            for most in (limit, SLACK * limit):
                promising = (points[n] for n in _order(predicted, most))
                point = next((one for one in promising if self._is_new(one, limit)), None)
                if point is not None:
                    self._try(point)
                if self._best(limit) != best:
                    break
            missed = 0 if self._best(limit) != best else missed + 1

    def _give_each_value_a_chance(self, limit: float) -> None:
        """Of the plans with each value of each lever, look at the one predicted to be best, if it is worth a look."""
        best = self._best(limit)
        if best is None:
            return
        points = self._pool(best)
        order = _order(self._predicted(points), limit)
        firsts: dict[tuple[int, int], Point] = {}
        for n in order:
            for lever_and_value in enumerate(points[n]):
                firsts.setdefault(lever_and_value, points[n])
        for point in self._worth_a_look([firsts[one] for one in sorted(firsts)], limit):
            if self._may_be_better(self.space.plan(point), limit):
                self._try(point)

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

    def _is_new(self, point: Point, limit: float) -> bool:
        """Whether a plan was not seen yet, and may be better than the best."""
        plan = self.space.plan(point)
        return plan not in self.seen and self._may_be_better(plan, limit)

    def _worth_a_look(self, points: list[Point], limit: float) -> list[Point]:
        """New points but for those that are predicted to be slower by far, from looks at each of their values."""
        some = [point for point in points if self._is_new(point, limit)]
        best = self._best(limit)
        if not some or best is None or self._points[best].bytes > limit:
            return some
        tried = {lever_and_value for point in self._points for lever_and_value in enumerate(point)}
        most = math.log(SLOWER * self._points[best].seconds)
        return [
            point
            for point, (seconds, _) in zip(some, self._predicted(some), strict=True)
            if seconds <= most or not tried.issuperset(enumerate(point))
        ]

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
