"""`Search`: the fastest point of a space that fits, found with few looks.

Every look teaches. What a step takes and what memory it needs at points not seen yet is predicted from those that were,
by kriging (Krige 1951) with a correlation that falls by one factor for each lever that differs. Predictions choose what
to look at next; what is found has been looked at. Nothing is drawn at random.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from fsdp_sim.explore.space import Point, Space
from fsdp_sim.spec import Plan

UNLIKE, PAIRS = 0.2, 2  # of a lever before anything is known of it, and as many pairs as that counts for
ADDS = 3.0  # times as much of what plans have in common is what each lever adds, as what several do together
NOISE = 1e-6  # keeps the system of equations solvable where two points behave alike
PATIENCE = 3  # looks in a row that find nothing better, after which predictions are followed no longer
SLACK = 1.08  # every other look is at what is predicted to fit a limit that is so much higher
DOUBT = 1.0  # standard deviations by which a prediction may be wrong
HOPELESS = (1.0, 1.1)  # times the best's seconds, and the limit: who takes more even then is not looked at
FAR = 2  # levers in which a predicted point differs from the best, where there are too many points to predict all
MOST = 5_000  # points that are predicted at once


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
        self._plan = functools.cache(space.plan)

    def best(self, limit: float) -> Plan | None:
        """The fastest plan seen that fits, else the one that needs least memory; None if none is possible."""
        point = self._best(limit)
        return None if point is None else self._plan(point)

    def run(self, limit: float) -> None:
        """Look for the fastest plan that fits: near the best, then once more wherever a value had no chance."""
        self.settle(limit)
        self._give_each_value_a_chance(limit)
        self.settle(limit)

    def settle(self, limit: float) -> None:
        """Look until nothing that is predicted to be better, and no neighbour of the best, is better."""
        self._try(tuple(0 for _ in self.space.sizes), limit)
        base = None
        while self._best(limit) != base:
            self.follow(limit)
            base = self._best(limit)
            assert base is not None
            for point in self._promising(self._near(base, 1), limit, hopeful=False):
                if self._best(limit) == base:
                    self._try(point, limit)
            if self._best(limit) == base:  # the neighbours taught something
                self.follow(limit)

    def follow(self, limit: float, patience: int = PATIENCE) -> None:
        """Look at what is predicted to be best, until some looks in a row have found nothing better."""
        idle = 0
        while idle < patience and (best := self._best(limit)) is not None:
            points = self._promising(self._pool(best), limit, SLACK if idle % 2 else 1.0)
            if not points:
                return
            self._try(points[0], limit)
            idle = 0 if self._best(limit) != best else idle + 1

    def _give_each_value_a_chance(self, limit: float) -> None:
        """Of the plans with each value of each lever, look at the one that is predicted to be best."""
        best = self._best(limit)
        if best is None:
            return
        points = self._promising(self._pool(best), limit, hopeful=False)
        for lever, size in enumerate(self.space.sizes):
            for value in range(size):
                first = next((point for point in points if point[lever] == value), None)
                if first is not None:
                    self._try(first, limit)

    def _try(self, point: Point, limit: float) -> None:
        if self._open([point], limit):
            plan = self._plan(point)
            assert plan is not None
            outcome = self.seen[plan] = self._look(plan)
            if outcome is not None:
                self._points[point] = outcome

    def _open(self, points: Iterable[Point], limit: float) -> list[Point]:
        """Those that were not seen, and of which it is not known that they are no better than the best; of points with
        the same plan the first.
        """
        best = self._best(limit)
        most_s, most_bytes = (math.inf, math.inf) if best is None else self._points[best]
        if most_bytes > limit:  # none fits yet: less memory is better
            most_s = math.inf
        elif best is not None:
            most_bytes = math.nextafter(limit, math.inf)
        found: dict[Plan, Point] = {}
        for point in points:
            plan = self._plan(point)
            if plan is not None and plan not in self.seen and plan not in found:
                least = self._bound(plan)
                if least is not None and least.seconds < most_s and least.bytes < most_bytes:
                    found[plan] = point
        return list(found.values())

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

    def _promising(self, some: Iterable[Point], limit: float, slack: float = 1.0, hopeful: bool = True) -> list[Point]:
        """Those that may be better, the most promising first: those predicted to fit a limit so many times as high, the
        fastest first, then the others, smallest first. How far what was seen is above its bounds teaches how far they
        are. ``hopeful``: without those that are predicted to be worse by far.
        """
        import numpy as np  # which only a search needs

        points, best = self._open(some, limit), self._best(limit)
        if not points or best is None:
            return points
        seen = list(self._points)
        known, least = self._one_hot(seen), self._least(seen)
        above = np.array(list(self._points.values())) - least
        mean, spread = above.mean(axis=0), above.std(axis=0)
        unlike = self._unlike(known, above)
        alike = self._alike(self._one_hot(points), known, unlike)
        weights = np.linalg.solve(self._alike(known, known, unlike) + NOISE * np.eye(len(known)), alike.T).T
        bounds = self._least(points)
        seconds, n_bytes = np.maximum(bounds, bounds + mean + weights @ (above - mean)).T
        order = np.lexsort((np.where(n_bytes <= slack * limit, seconds, n_bytes), n_bytes > slack * limit))
        if hopeful and (now := self._points[best]).bytes <= limit:
            unsure = DOUBT * np.sqrt(np.maximum(0.0, 1.0 - (weights * alike).sum(axis=1)))
            hope = (seconds - unsure * spread[0] < HOPELESS[0] * now.seconds) & (
                n_bytes - unsure * spread[1] < HOPELESS[1] * limit
            )
            order = order[hope[order]]
        return [points[n] for n in order]

    def _least(self, points: list[Point]) -> Any:
        import numpy as np

        return np.array([self._bound(self._plan(point)) for point in points], dtype=float)

    def _unlike(self, known: Any, above: Any) -> Any:
        """For each lever how unlike two plans are that differ in it alone: half of the mean square of the difference,
        as a variogram has it, in units of the variance; beside pairs that were seen, some that stand for what was not.
        """
        import numpy as np

        which = np.repeat(np.arange(len(self.space.sizes)), self.space.sizes)
        same = np.array([known[:, which == n] @ known[:, which == n].T for n in range(len(self.space.sizes))])
        first, second = np.triu_indices(len(known), 1)
        differ = 1.0 - same[:, first, second]
        alone = differ * (differ.sum(axis=0) == 1)
        squares = ((above[first] - above[second]) ** 2 / np.maximum(above.var(axis=0), 1e-30)).mean(axis=1) / 2
        half = (UNLIKE * PAIRS + alone @ squares) / (PAIRS + alone.sum(axis=1))
        return -np.log1p(-np.clip(half, NOISE, 0.9))

    def _alike(self, some: Any, others: Any, unlike: Any) -> Any:
        """Correlations: the product over the levers in which two points differ, and their sum."""
        import numpy as np

        agree = (some * np.repeat(unlike, self.space.sizes)) @ others.T - unlike.sum()
        return (np.exp(agree) + ADDS * (1.0 + agree / unlike.sum())) / (1.0 + ADDS)

    def _one_hot(self, points: list[Point]) -> Any:
        import numpy as np

        before = np.cumsum((0, *self.space.sizes[:-1]))
        marks = np.zeros((len(points), sum(self.space.sizes)))
        marks[np.arange(len(points))[:, None], np.array(points) + before] = 1.0
        return marks
