"""What a law is: a change of a request, and what becomes of one outcome. The tables of laws are the files beside this.

    laws("twice the bandwidth between nodes", over_nodes, cluster(inter=faster(2)), stays=[PROGRAM], never_grows=[STEP])

is two laws: "twice the bandwidth between nodes: the program stays as it is" and "...: the step time never grows".
`given` makes a drawn request one that the law speaks of, so that each law is tried with every draw.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from fsdp_sim.cost import Calibration, Workload
from fsdp_sim.cost import workload as workload_of
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Model, Plan

NEAR = 1e-9  # relative: rounding


class Request(NamedTuple):
    """What is simulated. ``rewrite`` makes other work of the model's."""

    model: Model
    cluster: Cluster
    plan: Plan
    calibration: Calibration | None = None
    rewrite: Callable[[Workload], Workload] | None = None


Change = Callable[[Request], Request]


def simulated(request: Request) -> Simulation:
    return _simulated(request, repr(request.plan))


@functools.lru_cache(maxsize=32)
def _simulated(request: Request, plan_in_words: str) -> Simulation:  # of plans where 1 stands for True the words differ
    model, cluster, plan, calibration, rewrite = request
    what = rewrite(workload_of(model, plan)) if rewrite else model
    return simulate(what, cluster, plan, calibration=calibration)


class Outcome(NamedTuple):
    """Something that a simulation says: a number, or what can be compared."""

    name: str
    of: Callable[[Simulation], Any]


class Relation(NamedTuple):
    """How an outcome after a change stands to the one before."""

    words: str
    holds: Callable[[Any, Any], bool]


def near(a: Any, b: Any) -> bool:
    numbers = isinstance(a, int | float) and isinstance(b, int | float)
    return math.isclose(a, b, rel_tol=NEAR, abs_tol=1e-15) if numbers else a == b


def _times(low: float, high: float) -> Callable[[float, float], bool]:
    slack = NEAR * max(abs(low), 1.0)
    return lambda a, b: (low - slack) * a <= b + 1e-15 and (math.isinf(high) or b <= (high + slack) * a + 1e-15)


RELATIONS = {
    "stays": Relation("stays as it is", near),
    "never_grows": Relation("never grows", _times(0.0, 1.0)),
    # Two orders of the same operations: one that starts some earlier may hold up others (Graham 1966)
    "hardly_grows": Relation("grows by a hundredth at most", _times(0.0, 1.01)),
    "never_falls": Relation("never falls", _times(1.0, math.inf)),
    "grows": Relation("grows", lambda a, b: b > a),
    "falls": Relation("falls", lambda a, b: b < a),
    "doubles": Relation("doubles", _times(2.0, 2.0)),
    "quadruples": Relation("quadruples", _times(4.0, 4.0)),
    "halves": Relation("halves", _times(0.5, 0.5)),
    "at_most_doubles": Relation("grows, at most to the double", _times(1.0, 2.0)),
    "at_most_quadruples": Relation("grows, at most to four times as much", _times(1.0, 4.0)),
    "more_than_doubles": Relation("at least doubles, at most quadruples", _times(2.0, 4.0)),
    "vanishes": Relation("becomes nothing", lambda a, b: abs(b) < 1e-12),
}


class Laws(NamedTuple):
    """A change, and what becomes of each outcome: a law for each."""

    change: str
    given: Change
    to: Change
    outcomes: tuple[tuple[Outcome, Relation], ...]

    @property
    def statements(self) -> list[str]:
        return [f"{self.change}: {outcome.name} {relation.words}" for outcome, relation in self.outcomes]

    def broken_by(self, drawn: Request) -> list[str]:
        """What goes against it.

        Raises:
            ValueError: there is no such request, for example of a dtype that the GPU lacks.
        """
        request = self.given(drawn)
        before, after = simulated(request), simulated(self.to(request))
        found = [(o.of(before), o.of(after), r, s) for (o, r), s in zip(self.outcomes, self.statements, strict=True)]
        return [f"{said}: {_short(a)} -> {_short(b)}" for a, b, relation, said in found if not relation.holds(a, b)]


class Fact(NamedTuple):
    """A law of one request: the two sides of an equation or a bound."""

    statement: str
    given: Change
    left: Callable[[Simulation], Any]
    relation: Relation
    right: Callable[[Simulation], Any]

    @property
    def statements(self) -> list[str]:
        return [self.statement]

    def broken_by(self, drawn: Request) -> list[str]:
        sim = simulated(self.given(drawn))
        left, right = self.left(sim), self.right(sim)
        wrong = not self.relation.holds(left, right)
        return [f"{self.statement}: {_short(left)} against {_short(right)}"] * wrong


class Steady(NamedTuple):
    """Each further change of a kind adds as much as the one before, to each outcome."""

    change: str
    given: Change
    to: Change
    outcomes: tuple[Outcome, ...]

    @property
    def statements(self) -> list[str]:
        return [f"each {self.change} adds as much as the one before to {outcome.name}" for outcome in self.outcomes]

    def broken_by(self, drawn: Request) -> list[str]:
        first = self.given(drawn)
        second = self.to(first)
        three = [simulated(request) for request in (first, second, self.to(second))]
        wrong = []
        for outcome, said in zip(self.outcomes, self.statements, strict=True):
            a, b, c = map(outcome.of, three)
            if not math.isclose(b - a, c - b, rel_tol=NEAR, abs_tol=NEAR * abs(c)):
                wrong.append(f"{said}: {_short(b - a)}, then {_short(c - b)}")
        return wrong


Law = Laws | Fact | Steady


def steady(change: str, given: Change, to: Change, *outcomes: Outcome) -> Steady:
    """See `Steady`; ``change`` is one thing more."""
    return Steady(change, given, to, outcomes)


def laws(change: str, given: Change, to: Change, **relations: Sequence[Outcome]) -> Laws:
    """The keywords are names of `RELATIONS`."""
    found = ((o, RELATIONS[name]) for name, outcomes in relations.items() for o in outcomes)
    return Laws(change, given, to, tuple(found))


Said = Callable[[Simulation], Any]


def equals(statement: str, left: Said, right: Said, *given: Change) -> Fact:
    """The two are equal."""
    return Fact(statement, after(*given), left, RELATIONS["stays"], right)


def at_least(statement: str, left: Said, right: Said, *given: Change) -> Fact:
    """The left one is not less than the right one."""
    return Fact(statement, after(*given), left, RELATIONS["never_grows"], right)


# -- changes of requests


def as_drawn(request: Request) -> Request:
    return request


def after(*changes: Change) -> Change:
    """One after the other."""
    return lambda request: functools.reduce(lambda r, change: change(r), changes, request)


def _changed(part: str, fields: dict[str, Any]) -> Change:
    """A value that is a function makes the new value of the old one."""

    def change(request: Request) -> Request:
        old = getattr(request, part)
        values = {name: v(getattr(old, name)) if callable(v) else v for name, v in fields.items()}
        return request._replace(**{part: dataclasses.replace(old, **values)})

    return change


def plan(**fields: Any) -> Change:
    return _changed("plan", fields)


def model(**fields: Any) -> Change:
    return _changed("model", fields)


def cluster(**fields: Any) -> Change:
    return _changed("cluster", fields)


def times(factor: float) -> Callable[[Any], Any]:
    return lambda value: value * factor


def _short(value: Any) -> str:
    return f"{value:.12g}" if isinstance(value, int | float) else repr(value)[:200]
