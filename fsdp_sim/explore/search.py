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
MOST = 3_000  # ... so many plans that differ in the first levers alone, ...
CHANGES = 2  # ... and with one more change, or two where that promises nothing, ...
PROMISING = 20  # ... so many of them, and the first with each value, if ...
ROOM = 1.25  # ... a limit so much higher is kept, since another lever may make them fit, ...
SURE = 0.03  # ... and what is predicted is not surer than that, since another lever may make them faster


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
        self._start = tuple(0 for _ in space.sizes)
        self._limit: float | None = None
        self._least: dict[Plan | None, Outcome | None] = {}
        self._opened: tuple[tuple[Point, float] | None, dict[Point, Outcome]] = None, {}

    def best(self, limit: float) -> Plan | None:
        """The fastest plan seen that fits, else the one that needs least memory; None if none is possible."""
        point = self._best(limit)
        return None if point is None else self._plan(point)

    def run(self, limit: float) -> None:
        """Look for the fastest plan that fits."""
        self._try(self._start)
        self._settle(limit)
        _, rest = self._first
        if rest:  # not everything is predicted: each value has a chance
            for lever, size in enumerate(self.space.sizes):
                gains = self._open(limit, math.inf)
                for value in range(size):
                    of_value = [point for point in gains if point[lever] == value]
                    if of_value:
                        self._try(max(of_value, key=gains.__getitem__))
            self._settle(limit)

    def _settle(self, limit: float) -> None:
        """Look until no plan beside the best, and nothing that is predicted, is better."""
        base = None
        while True:
            self.follow(limit, GAIN)
            if (best := self._best(limit)) is None or best == base:
                return
            base = best
            for point in self._near(base):
                if self._hope(self._plan(point), self._most(limit)):
                    self._try(point)

    def follow(self, limit: float, gain: float, patience: float = math.inf) -> None:
        """Look where most is expected to be gained, until that is less than a share of the best's time, or so many
        looks in a row found nothing better."""
        best, in_vain = self._best(limit), 0
        while (gains := self._open(limit, gain)) and in_vain < patience:
            first = max(gains, key=gains.__getitem__)
            if gains[first] < gain:
                return
            self._try(first)
            before, best = best, self._best(limit)
            in_vain = in_vain + 1 if best == before else 0

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
        if plan not in self._least:
            self._least[plan] = None if plan is None else self._bound(plan, most)
        least = self._least[plan]
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

    def _near(self, base: Point, levers: Iterable[int] | None = None) -> Iterator[Point]:
        """The points that differ from one in one lever."""
        for lever in range(len(base)) if levers is None else levers:
            others = (value for value in range(self.space.sizes[lever]) if value != base[lever])
            yield from ((*base[:lever], value, *base[lever + 1 :]) for value in others)

    def _open(self, limit: float, enough: float) -> dict[Point, float]:
        """What is expected of looks at what may be better than the best, one point for each plan. Of too many points:
        those that differ from the best, or from the start, in the first levers alone, those beside the best, and the
        most promising with one more change; with two if less than ``enough`` is expected of all these."""
        if (best := self._best(limit)) is None:
            return {}
        first, rest = self._first
        if self._limit != limit:  # what is no better than the best within one may be within another
            self._limit, self._least = limit, {}
        if self._opened[0] != (best, limit):
            tails = dict.fromkeys(point[rest.start : rest.stop] for point in (best, self._start))
            every = ((*point, *tail) for tail in tails for point in first)
            self._opened = (best, limit), self._hopes(itertools.chain(every, self._near(best)), limit)
        new, gain = self._opened[1], self._gains(limit)
        gains: dict[Point, float] = {}
        promise: dict[Point, float] = {}
        for changes in range(1 + CHANGES):
            if not new or (changes > 1 and max(gains.values(), default=0.0) >= enough):
                break
            known = (self._plan(point) in self.seen for point in new)
            gains |= {point: one for point, one, seen in zip(new, gain(new), known, strict=True) if not seen}
            if not rest:
                break
            promise |= dict(zip(new, gain(new, ROOM, SURE), strict=True))
            order = sorted(promise, key=promise.__getitem__, reverse=True)
            of_value = {place: point for point in reversed(order) for place in enumerate(point)}
            promising = dict.fromkeys([*order[:PROMISING], *of_value.values()])
            beside = (other for point in promising for other in self._near(point, rest) if other not in promise)
            new = self._hopes(beside, limit)
        return gains

    def _hopes(self, points: Iterable[Point], limit: float) -> dict[Point, Outcome]:
        """Of points that may be better than the best, one for each plan, what they take at least."""
        most, plans = self._most(limit), dict[Plan | None, Point]()
        for point in points:
            plans.setdefault(self._plan(point), point)
        return {point: least for plan, point in plans.items() if (least := self._hope(plan, most))}

    @functools.cached_property
    def _first(self) -> tuple[list[Point], range]:
        """Values of the first levers, of as many as there are few enough plans, one for each; and the other levers."""
        points: list[Point] = [()]
        most = WHOLE if len(self.space) <= WHOLE else MOST
        for lever, size in enumerate(self.space.sizes):
            plans: dict[Plan | None, Point] = {None: ()}
            for point in [(*point, value) for point in points for value in range(size)]:
                plans.setdefault(self._plan((*point, *self._start[lever + 1 :])), point)
            del plans[None]
            if len(plans) > most:
                return points, range(lever, len(self._start))
            points = list(plans.values())
        return points, range(len(self._start), len(self._start))

    def _gains(self, limit: float) -> Callable[..., Any]:
        """By how much a look at some points is expected to lower the logarithm of the best's seconds; where none fits
        yet, of its bytes. With ``room`` in memory, and nothing ``sure``, it tells what is promising."""
        import numpy as np

        points, best = list(self._points), self._best(limit)
        assert best is not None
        now, known = self._points[best], self._one_hot(points)
        above = _logs(self._points.values()) - _logs(self._bound(self._plan(point)) for point in points)
        held = [bool(one.held) for one in self._points.values()]
        more = [math.log(one.held / one.bytes) for one in self._points.values() if one.held]
        of_seconds, of_bytes = self._predict(0, known, above[:, 0]), self._predict(1, known, above[:, 1])
        of_held = self._predict(2, known[held], np.array(more)) if more else None
        apart = known.T @ known == 0.0

        def gains(asked: Mapping[Point, Outcome], room: float = 1.0, sure: float = 0.0) -> Any:
            marks, least = self._one_hot(list(asked)), _logs(asked.values())
            doubt = np.where((marks * (marks @ apart)).any(axis=1), DOUBT, 1.0)
            (seconds, unsure_s), (n_bytes, unsure_bytes) = of_seconds(marks), of_bytes(marks)
            if of_held:
                above_bytes, unsure = of_held(marks)
                n_bytes, unsure_bytes = n_bytes + above_bytes, np.hypot(unsure_bytes, unsure)
            if now.needs > limit:
                unsure_bytes = np.maximum(sure, doubt * unsure_bytes)
                return unsure_bytes * np.logaddexp(0.0, (math.log(now.needs) - least[:, 1] - n_bytes) / unsure_bytes)
            unsure_s = np.maximum(sure, doubt * unsure_s)
            fits = np.exp(-np.logaddexp(0.0, (n_bytes + least[:, 1] - math.log(room * limit)) / unsure_bytes))
            return fits * unsure_s * np.logaddexp(0.0, (math.log(now.seconds) - least[:, 0] - seconds) / unsure_s)

        return gains

    def _predict(self, n: int, known: Any, above: Any) -> Callable[[Any], tuple[Any, Any]]:
        """What is predicted elsewhere from what is known, and the scale of a logistic distribution around it."""
        import numpy as np

        self._learn(n, known, above)
        doublings = self._doublings[n]
        inverse = np.linalg.inv(self._alike(known, known, doublings) + NOISE * np.eye(len(known)))
        weights = inverse @ above
        variance = (above @ weights + WEIGHT * SPREAD**2) / (len(known) + WEIGHT)

        def predicted(marks: Any) -> tuple[Any, Any]:
            alike = self._alike(marks, known, doublings)
            unsure = np.maximum(1e-12, 1.0 + LEVEL - ((alike @ inverse) * alike).sum(axis=1))
            return np.maximum(0.0, alike @ weights), np.sqrt(variance * unsure) / LOGISTIC

        return predicted

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
