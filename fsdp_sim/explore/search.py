"""`Search`: the fastest point of a space that fits, found with few looks.

What a step takes, what memory it needs and what torch's allocator holds of it are predicted at points not seen yet by
kriging (Krige 1951). How far a plan is above its bound is alike in plans that differ in few levers; how much each lever
matters is learnt, as what makes likeliest what was seen. The next look is where most is expected to be gained (Jones et
al. 1998, "Efficient global optimization"): where a plan is predicted to be fast, or where little is known. What is
proven to be no better than the best is not looked at. Nothing is drawn at random.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fsdp_sim.explore.space import Point, Space
from fsdp_sim.spec import Plan

UNLIKE = 0.1  # minus the logarithm of the correlation of two plans that differ in one lever, before anything is known
DOUBLINGS = (-7, 3)  # how often that is halved or doubled at most
BELIEF = 0.25  # what the square of these costs in likelihood
NOISE = 1e-6  # keeps the system of equations solvable where two points behave alike
LEVEL = 4.0  # variance of what all plans have in common, in units of that of each
SPREAD, WEIGHT = 0.1, 2.0  # of logarithms before anything is known, and as many looks as that counts for
LOGISTIC = 1.702  # a logistic distribution with a scale of 1 is like a normal one with this deviation
DOUBT = 3.0  # times as unsure is what two values do that were not seen together
GAIN = 1e-3  # of a step: the least that is expected from a look
MORE = 1.2  # times the points from which it was learnt how much each lever matters, it is learnt again
WHOLE = 25_000  # points of a space that are all predicted; of a larger one ...
MOST = 1_500  # ... so many that differ from the best in the first levers alone
PROMISING = 20  # ... of these so many with one more change, and the best with one


class Outcome(NamedTuple):
    """What a look tells: seconds of a GPU per token, bytes alive, and, where it is known, what the allocator holds."""

    seconds: float
    bytes: float
    held: float | None = None

    @property
    def needs(self) -> float:
        """What has to fit."""
        return self.held or self.bytes


class Search:
    """A search that remembers what it has seen.

    Args:
        look: simulates a plan; None if it is impossible.
        bound: of a plan, what it takes at least; None if it is impossible. With an outcome beside it, anything that
            is not less will do where it is not less than that.

    Attributes:
        seen: outcomes by plan.
    """

    def __init__(
        self, space: Space, look: Callable[[Plan], Outcome | None], bound: Callable[..., Outcome | None]
    ) -> None:
        import numpy as np  # which only a search needs

        self.space = space
        self._look = look
        self._plan = functools.cache(space.plan)
        self._bound = bound
        self.seen: dict[Plan, Outcome | None] = {}
        self._points: dict[Point, Outcome] = {}  # one for each plan that is possible
        self._doublings = np.zeros((3, len(space.sizes)), int)
        self._learnt = [0, 0, 0]  # from so many points
        self._opened: tuple[tuple[Point, float] | None, dict[Point, Outcome]] = None, {}

    def best(self, limit: float) -> Plan | None:
        """The fastest plan seen that fits, else the one that needs least memory; None if none is possible."""
        point = self._best(limit)
        return None if point is None else self._plan(point)

    def run(self, limit: float) -> None:
        """Look for the fastest plan that fits, until no plan beside it, and nothing that is predicted, is better."""
        self._try(tuple(0 for _ in self.space.sizes))
        base = None
        while True:
            self.follow(limit, GAIN)
            if (best := self._best(limit)) is None or best == base:
                return
            base = best
            for point in self._near(base):
                if self._hope(self._plan(point), self._most(limit)):
                    self._try(point)

    def follow(self, limit: float, gain: float) -> None:
        """Look where most is expected to be gained, until that is less than a share of the best's time."""
        while points := self._open(limit):
            gains = self._gains(points, limit)
            first = int(gains.argmax())
            if gains[first] < gain:
                return
            self._try(list(points)[first])

    def _most(self, limit: float) -> Outcome | None:
        """What a plan that is better than the best takes less than."""
        if (best := self._best(limit)) is None:
            return None
        now = self._points[best]
        if now.needs > limit:  # none fits yet: less memory is better
            return Outcome(math.inf, now.needs)
        return Outcome(now.seconds, math.nextafter(limit, math.inf))

    def _hope(self, plan: Plan | None, most: Outcome | None) -> Outcome | None:
        """What a plan takes at least; None if it is impossible, or proven to be no better than the best."""
        least = None if plan is None else self._bound(plan, most)
        if least and most and (least.seconds >= most.seconds or least.bytes >= most.bytes):
            return None
        return least

    def _try(self, point: Point) -> None:
        plan = self._plan(point)
        if plan is None or plan in self.seen:
            return
        outcome = self.seen[plan] = self._look(plan)
        if outcome is not None:
            self._points[point] = outcome

    def _best(self, limit: float) -> Point | None:
        def rank(point: Point) -> tuple[bool, float, float]:
            one = self._points[point]
            return (True, one.needs, one.seconds) if one.needs > limit else (False, one.seconds, one.needs)

        return min(self._points, key=rank, default=None)

    def _near(self, base: Point) -> Iterator[Point]:
        """The points that differ from one in one lever."""
        for lever, size in enumerate(self.space.sizes):
            yield from ((*base[:lever], value, *base[lever + 1 :]) for value in range(size) if value != base[lever])

    def _open(self, limit: float) -> dict[Point, Outcome]:
        """What may be better than the best, one point for each plan, with its bound. Of too many points: those that
        differ from the best in the first levers alone, the most promising with one more change, and those beside it."""
        if (best := self._best(limit)) is None:
            return {}
        if self._opened[0] != (best, limit):
            sizes, head = self.space.sizes, len(self.space.sizes)
            if math.prod(sizes) > WHOLE:
                while math.prod(sizes[:head]) > MOST:
                    head -= 1
            most = self._most(limit)
            found: dict[Plan | None, tuple[Point, Outcome | None]] = {}

            def add(points: Iterable[Point]) -> None:
                for point in points:
                    if (plan := self._plan(point)) not in found:
                        found[plan] = point, self._hope(plan, most)

            add((*first, *best[head:]) for first in itertools.product(*map(range, sizes[:head])))
            if head < len(sizes):
                promising = sorted((least, point) for point, least in found.values() if least)[:PROMISING]
                add(
                    (*point[:lever], value, *point[lever + 1 :])
                    for _, point in promising for lever in range(head, len(sizes)) for value in range(sizes[lever])
                )  # fmt: skip
                add(self._near(best))
            self._opened = (best, limit), {point: least for point, least in found.values() if least}
        _, points = self._opened
        return {point: least for point, least in points.items() if self._plan(point) not in self.seen}

    def _gains(self, open_points: Mapping[Point, Outcome], limit: float) -> Any:
        """By how much a look at each is expected to lower the logarithm of the best's seconds; where none fits yet, of
        its bytes."""
        import numpy as np

        points, best = list(self._points), self._best(limit)
        assert best is not None
        now, least, marks = self._points[best], _logs(open_points.values()), self._one_hot(list(open_points))
        above = _logs(self._points.values()) - _logs(self._bound(self._plan(point)) for point in points)
        seconds, unsure_s = self._predicted(0, points, above[:, 0], marks)
        n_bytes, unsure_bytes = self._predicted(1, points, above[:, 1], marks)
        if held := {point: math.log(one.held / one.bytes) for point, one in self._points.items() if one.held}:
            more, unsure = self._predicted(2, list(held), np.array(list(held.values())), marks)
            n_bytes, unsure_bytes = n_bytes + more, np.hypot(unsure_bytes, unsure)
        seen = self._one_hot(points)
        doubt = np.where((marks * (marks @ (seen.T @ seen == 0.0))).any(axis=1), DOUBT, 1.0)
        if now.needs > limit:
            unsure_bytes *= doubt
            return unsure_bytes * np.logaddexp(0.0, (math.log(now.needs) - least[:, 1] - n_bytes) / unsure_bytes)
        unsure_s *= doubt
        fits = np.exp(-np.logaddexp(0.0, (n_bytes + least[:, 1] - math.log(limit)) / unsure_bytes))
        return fits * unsure_s * np.logaddexp(0.0, (math.log(now.seconds) - least[:, 0] - seconds) / unsure_s)

    def _predicted(self, n: int, points: list[Point], above: Any, marks: Any) -> tuple[Any, Any]:
        """What is predicted elsewhere, and the scale of a logistic distribution around it."""
        import numpy as np

        known = self._one_hot(points)
        self._learn(n, known, above)
        alike = self._alike(marks, known, self._doublings[n])
        system = self._alike(known, known, self._doublings[n]) + NOISE * np.eye(len(known))
        weights = np.linalg.solve(system, np.c_[above, alike.T])
        variance = (above @ weights[:, 0] + WEIGHT * SPREAD**2) / (len(known) + WEIGHT)
        unsure = np.maximum(1e-12, 1.0 + LEVEL - (alike * weights[:, 1:].T).sum(axis=1))
        return np.maximum(0.0, alike @ weights[:, 0]), np.sqrt(variance * unsure) / LOGISTIC

    def _learn(self, n: int, known: Any, above: Any) -> None:
        """How much each lever matters: its correlation is halved or doubled as long as that is likelier."""
        import numpy as np

        if len(known) < MORE * self._learnt[n] + 1:
            return
        self._learnt[n] = len(known)
        now = self._doublings[n]

        def unlikely() -> float:
            root = np.linalg.cholesky(self._alike(known, known, now) + NOISE * np.eye(len(known)))
            variance = (np.linalg.solve(root, above) ** 2).sum() + WEIGHT * SPREAD**2
            fit = 2.0 * np.log(np.diag(root)).sum() + (len(known) + WEIGHT) * math.log(variance)
            return float(fit + BELIEF * (now**2).sum())

        least = unlikely()
        for lever, step in itertools.product(range(len(now)), (1, -1)):
            while DOUBLINGS[0] <= now[lever] + step <= DOUBLINGS[1]:
                now[lever] += step
                if (there := unlikely()) >= least:
                    now[lever] -= step
                    break
                least = there

    def _alike(self, some: Any, others: Any, doublings: Any) -> Any:
        import numpy as np

        unlike = UNLIKE * 2.0**doublings
        return LEVEL + np.exp((some * np.repeat(unlike, self.space.sizes)) @ others.T - unlike.sum())

    def _one_hot(self, points: list[Point]) -> Any:
        import numpy as np

        before = np.cumsum((0, *self.space.sizes[:-1]))
        marks = np.zeros((len(points), sum(self.space.sizes)))
        marks[np.arange(len(points))[:, None], np.array(points) + before] = 1.0
        return marks


def _logs(outcomes: Iterable[Any]) -> Any:
    import numpy as np

    return np.log(np.array([(one.seconds, one.bytes) for one in outcomes]))
