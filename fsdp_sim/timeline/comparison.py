"""Two timelines laid beside each other: what is in one alone, where order and times part, where the difference went.

Operations are matched by what they are (operation, unit, micro-batch) and by how often that has occurred on the rank
before. "Order" is issue order on the rank; lanes are never ordered against each other. Seconds count from where each
step begins, so clocks need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from fsdp_sim.timeline.analysis import median_step
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import COLLECTIVES, Op
from fsdp_sim.timeline.side import Side, UnitTimes
from fsdp_sim.timeline.timeline import Timeline

TOLERANCE = 0.01  # of the longer step: by how much times may differ and still be the same
ESSENTIAL = COLLECTIVES | {Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM}  # the others are copies, casts and scalings


class OperationPair(NamedTuple):
    """The same operation in both, and by how many seconds the second starts and ends later in its step."""

    a: Event
    b: Event
    start_later_s: float
    end_later_s: float

    @property
    def apart_s(self) -> float:
        return max(abs(self.start_later_s), abs(self.end_later_s))


class Divergence(NamedTuple):
    """The first place at which the issue orders differ: what each issues there, None where it has ended.

    Attributes:
        place: how many operations both have issued alike before it, copies that only one of them records left out.
        why: ``only in a``, ``only in b``, ``different`` (each is only in its own) or ``order`` (both have both).
    """

    place: int
    a: Event | None
    b: Event | None
    why: str


class UnitDifference(NamedTuple):
    """One unit in both; None where it does not occur."""

    unit: str
    a: UnitTimes | None
    b: UnitTimes | None

    @property
    def compute_s(self) -> float:
        """By how much longer it computes in b."""
        return (self.b.compute_s if self.b else 0.0) - (self.a.compute_s if self.a else 0.0)

    @property
    def exposed_s(self) -> float:
        """By how much longer its communication is exposed in b."""
        return (self.b.exposed_s if self.b else 0.0) - (self.a.exposed_s if self.a else 0.0)

    @property
    def lost_s(self) -> float:
        """Its part of the difference of the steps: positive where b is slower."""
        return self.compute_s + self.exposed_s


class DifferenceCauses(NamedTuple):
    """Where the difference of two steps went, as seconds more in b: compute + comm - hidden + idle is all of it.

    Attributes:
        compute_s: more compute.
        comm_s: more communication.
        hidden_s: more of the communication behind compute.
        idle_s: more time with neither.
    """

    compute_s: float
    comm_s: float
    hidden_s: float
    idle_s: float

    @property
    def exposed_s(self) -> float:
        return self.comm_s - self.hidden_s


@dataclass(frozen=True)
class Comparison:
    """Two steps beside each other. Differences are b less a: positive where b is longer or later.

    Attributes:
        a, b: the steps.
        tolerance_s: by how much times may differ and still count as the same.
        pairs: operations that are in both, in a's issue order.
        only_a, only_b: those that are not, in issue order.
    """

    a: Side
    b: Side
    tolerance_s: float
    pairs: tuple[OperationPair, ...] = field(repr=False)
    only_a: tuple[Event, ...] = field(repr=False)
    only_b: tuple[Event, ...] = field(repr=False)

    @property
    def identical(self) -> bool:
        """Both issue the same in the same order, and no operation's times differ by more than the tolerance."""
        return not self.only_a and not self.only_b and self.divergence is None and self.parted is None

    @property
    def step_difference_s(self) -> float:
        return self.b.step_s - self.a.step_s

    @cached_property
    def causes(self) -> DifferenceCauses:
        a, b = self.a, self.b
        hidden_s = (b.comm_s - b.exposed_s) - (a.comm_s - a.exposed_s)
        return DifferenceCauses(b.compute_s - a.compute_s, b.comm_s - a.comm_s, hidden_s, b.idle_s - a.idle_s)

    @cached_property
    def units(self) -> tuple[UnitDifference, ...]:
        """Every unit of either, a's first. What they lose and the difference in idle time sum to that of the steps."""
        names = [*self.a.units, *(unit for unit in self.b.units if unit not in self.a.units)]
        return tuple(UnitDifference(unit, self.a.units.get(unit), self.b.units.get(unit)) for unit in names)

    @cached_property
    def divergence(self) -> Divergence | None:
        """Where the issue orders first differ; None where they do not.

        Two ways to train, and two ways to record, differ in their copies, casts and scalings throughout. So these count
        only if both timelines have some of the kind.
        """
        kinds = {e.op for e in self.a.ops} & {e.op for e in self.b.ops} | ESSENTIAL
        of_a, of_b = ({key: e for key, e in side.keyed.items() if e.op in kinds} for side in (self.a, self.b))
        keys_a, keys_b = list(of_a), list(of_b)
        for place in range(max(len(keys_a), len(keys_b))):
            key_a = keys_a[place] if place < len(keys_a) else None
            key_b = keys_b[place] if place < len(keys_b) else None
            if key_a == key_b:
                continue
            alone_a, alone_b = key_a is not None and key_a not in of_b, key_b is not None and key_b not in of_a
            if alone_a and alone_b:
                why = "different"
            else:
                why = "only in a" if alone_a else "only in b" if alone_b else "order"
            return Divergence(place, of_a[key_a] if key_a else None, of_b[key_b] if key_b else None, why)
        return None

    @cached_property
    def parted(self) -> OperationPair | None:
        """The first operation in a's issue order whose start or end differs by more than the tolerance."""
        return next((pair for pair in self.pairs if pair.apart_s > self.tolerance_s), None)


def compare(
    a: Timeline,
    b: Timeline,
    *,
    step: int | None = None,
    rank: int | tuple[int, int] | None = None,
    tolerance_s: float | None = None,
) -> Comparison:
    """Lay a step of two timelines beside each other.

    Args:
        step: of both; by default in each the one of median duration, the first left out.
        rank: of both, or one of each; by default the first rank of each.
        tolerance_s: by how much times may differ and still be the same; by default 1% of the longer step.

    Raises:
        ValueError: a timeline has no operations, or not the step or the rank asked for.

    Example:
        >>> from fsdp_sim.timeline import Event, Header, Lane, Op, Timeline
        >>> def forward(seconds):
        ...     op = Event(seq=0, rank=0, op=Op.FWD, lane=Lane.COMPUTE, unit="layers.0", end_s=seconds)
        ...     return Timeline(Header(producer="doc", clock="simulated", world_size=1), [op])
        >>> found = compare(forward(1.0), forward(1.5))
        >>> found.step_difference_s, found.causes.compute_s, found.divergence, found.parted.end_later_s
        (0.5, 0.5, None, 0.5)
    """
    ranks = rank if isinstance(rank, tuple) else (rank, rank)
    side_a, side_b = _side("first", a, step, ranks[0]), _side("second", b, step, ranks[1])
    if tolerance_s is None:
        tolerance_s = TOLERANCE * max(side_a.step_s, side_b.step_s)
    of_a, of_b = side_a.keyed, side_b.keyed
    pairs = []
    for key, event in of_a.items():
        if (other := of_b.get(key)) is not None:
            start_later_s = side_b.since_s(other) - side_a.since_s(event)
            end_later_s = start_later_s + other.duration_s - event.duration_s
            pairs.append(OperationPair(event, other, start_later_s, end_later_s))
    only_a = tuple(e for key, e in of_a.items() if key not in of_b)
    only_b = tuple(e for key, e in of_b.items() if key not in of_a)
    return Comparison(side_a, side_b, tolerance_s, tuple(pairs), only_a, only_b)


def _side(which: str, timeline: Timeline, step: int | None, rank: int | None) -> Side:
    if not timeline.ops:
        raise ValueError(f"the {which} timeline has no operations; there is nothing to compare: {timeline!r}")
    ranks, steps = sorted({e.rank for e in timeline.ops}), sorted({e.step for e in timeline.ops})
    if step is not None and step not in steps:
        raise ValueError(f"step {step} is not in the {which} timeline; it has steps {steps}")
    if rank is not None and rank not in ranks:
        raise ValueError(f"rank {rank} is not in the {which} timeline; it has ranks {ranks}")
    chosen = median_step(Timeline(timeline.header, timeline.ops)) if step is None else step
    of_step = sorted({e.rank for e in timeline.ops if e.step == chosen})
    return Side(timeline, chosen, of_step[0] if rank is None else rank)
