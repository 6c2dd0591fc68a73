"""Numbers computed from a timeline: step times, exposed communication, overlap, typical durations.

Because issue order and lanes are in the record these are computed, not guessed, and mean the same for a
predicted and a measured run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf
from typing import TYPE_CHECKING, Literal

from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import COLLECTIVES, COMM_LANES, Lane, Op
from fsdp_sim.timeline.timeline import Timeline

if TYPE_CHECKING:
    import numpy as np

Interval = tuple[float, float]

_OTHER, _COMPUTE = Op.OTHER, Lane.COMPUTE  # Python 3.11 is slow to look up an enum's member


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points covered by disjoint intervals in ascending order."""
    merged: list[Interval] = []
    since = until = float("-inf")  # of the one that grows
    for start, end in sorted(intervals):
        if start > until:
            if until > since:
                merged.append((since, until))
            since, until = start, end
        elif end > until:
            until = end
    if until > since:
        merged.append((since, until))
    return merged


def subtract(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """The parts of ``intervals`` that no hole covers, disjoint and ascending."""
    rest: list[Interval] = []
    cuts = union(holes)
    at = 0  # the first hole that may still matter; both lists ascend, so each is walked once
    for start, end in union(intervals):
        while at < len(cuts) and cuts[at][1] <= start:
            at += 1
        rest += uncovered(start, end, cuts, at)
    return rest


def uncovered(start: float, end: float, cuts: Sequence[Interval], at: int | None = None) -> list[Interval]:
    """The parts of one interval that no cut covers.

    Args:
        cuts: disjoint and ascending, as `union` makes them.
        at: the first cut that ends after ``start``, if the caller knows it.
    """
    here = bisect_right(cuts, start, key=_end_of) if at is None else at
    rest: list[Interval] = []
    if here < len(cuts) and cuts[here][0] <= start and end <= cuts[here][1]:
        return rest
    while here < len(cuts) and cuts[here][0] < end:
        if cuts[here][0] > start:
            rest.append((start, cuts[here][0]))
        start = cuts[here][1]
        here += 1
    if start < end:
        rest.append((start, end))
    return rest


def _end_of(interval: Interval) -> float:
    return interval[1]


def total_s(intervals: Iterable[Interval]) -> float:
    """The summed length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def spans_of(events: Iterable[Event]) -> list[Interval]:
    """When each event starts and ends."""
    return [(e.start_s, e.end_s) for e in events]


def busy_s(events: Iterable[Event]) -> float:
    """Seconds in which at least one of some operations of a lane ran.

    Of an operation that waited for the CPU to launch its next kernel that time does not count (`Event.unlaunched_s`).
    """
    some = list(events)
    return total_s(union(spans_of(some))) - sum([e.unlaunched_s for e in some])


def in_turn(events: Iterable[Event]) -> list[tuple[Event, Interval]]:
    """Events with what each adds to the time that those before it cover; those that add nothing are left out."""
    found: list[tuple[Event, Interval]] = []
    reached = float("-inf")
    for event in sorted(events, key=lambda e: (e.start_s, e.seq)):
        start = max(event.start_s, reached)
        if event.end_s > start:
            found.append((event, (start, event.end_s)))
            reached = event.end_s
    return found


def group_number(op: Op, rank: int, group_size: int, world_size: int, apart: int = 1) -> int:
    """Which of the groups of a collective a rank is in: shards are consecutive ranks, or ranks so far ``apart``, and
    replicas, which all-reduce, those at equal positions of them.

    Example:
        >>> [group_number(Op.ALL_GATHER, rank, 2, 8, apart=2) for rank in range(8)]
        [0, 1, 0, 1, 2, 3, 2, 3]
    """
    if group_size >= world_size:
        return 0
    if op is Op.ALL_REDUCE:
        return rank % (world_size // group_size)
    return rank // (group_size * apart) * apart + rank % apart


def communicates(op: Op, lane: Lane) -> bool:
    """Whether an operation is communication: a collective, whatever its lane, or something unnamed on a lane of
    communication. FSDP1's post-backward stream also divides and casts, and a collective may be issued on compute.
    """
    return op in COLLECTIVES or (op is _OTHER and lane in COMM_LANES)


def computes(op: Op, lane: Lane) -> bool:
    """Whether an operation keeps the compute lane busy; copies on it count."""
    return lane is _COMPUTE and op not in COLLECTIVES


def exposed_intervals(timeline: Timeline, rank: int) -> list[Interval]:
    """When a rank communicated and its compute lane was idle."""
    mine = [e for e in timeline.ops if e.rank == rank]
    comm = spans_of(e for e in mine if communicates(e.op, e.lane))
    return subtract(comm, spans_of(e for e in mine if computes(e.op, e.lane)))


def exposed_comm_s(timeline: Timeline, rank: int) -> float:
    """Seconds a rank communicated without computing: the communication that cost time."""
    return total_s(exposed_intervals(timeline, rank))


def overlap(timeline: Timeline, rank: int) -> float:
    """Time computing while communicating over time communicating, 0 to 1 (as Holistic Trace Analysis defines it)."""
    comm = union(spans_of(e for e in timeline.ops if e.rank == rank and communicates(e.op, e.lane)))
    comm_s = total_s(comm)
    return 1.0 - exposed_comm_s(timeline, rank) / comm_s if comm_s else 0.0


Exposure = Literal["none", "next to none", "hidden", "exposed"]
HIDDEN = 0.1  # communication of which at most this part is exposed counts as hidden


def exposure_of(comm_s: float, exposed_s: float, step_s: float, small: float) -> Exposure:
    """What can truly be said of the communication of a step: there is none, or next to none; it is hidden; or exposed.

    It is hidden where what is exposed is small beside the step and beside the communication itself.

    Args:
        comm_s: seconds in which there is communication; ``exposed_s``: those of them in which nothing computes.
        small: the part of a step that is not worth telling.

    Example:
        >>> exposure_of(0.054, 0.053, 20.0, small=0.005), exposure_of(0.5, 0.01, 20.0, small=0.005)
        ('next to none', 'hidden')
    """
    if comm_s <= 0:
        return "none"
    if comm_s < small * step_s:
        return "next to none"
    return "hidden" if exposed_s < small * step_s and exposed_s <= HIDDEN * comm_s else "exposed"


def step_time_s(timeline: Timeline, step: int) -> float:
    """How long a step lasts, over all ranks: see `spans_of_steps`."""
    spans = spans_of_steps(timeline)
    if step not in spans:
        raise ValueError(f"step {step} has no operations; the steps that have some are {sorted(spans)}")
    return spans[step][1] - spans[step][0]


def median_step(timeline: Timeline, *, skip: int = 1) -> int:
    """The step of median duration, leaving out the first ``skip`` (caches and allocators are cold in those).

    Raises:
        ValueError: no step has operations.
    """
    spans = spans_of_steps(timeline)
    steps = sorted(spans)[skip:] or sorted(spans)
    if not steps:
        raise ValueError(f"{timeline!r} has no operations, so no typical step")
    return sorted(steps, key=lambda step: spans[step][1] - spans[step][0])[len(steps) // 2]


def spans_of_steps(timeline: Timeline) -> dict[int, Interval]:
    """When the steps in which something runs begin and end; a step may also have nothing but a free.

    A step ends when its last operation does. A simulated one begins when the one before ends, the first at 0, and so
    contains the time in which the CPU issues its first operation; a measured one begins with the first start, for
    what a training loop does between two steps is not in the record.
    """
    begins_s: dict[int, float] = {}
    ends_s: dict[int, float] = {}
    columns = timeline.columns.operations
    starts, ends, done = columns["start_s"], columns["end_s"], 0
    for step, same in groupby(columns["step"]):
        some = slice(done, done := done + len(list(same)))
        begins_s[step] = min(begins_s.get(step, inf), min(starts[some]))
        ends_s[step] = max(ends_s.get(step, -inf), max(ends[some]))
    if timeline.header.clock == "simulated":
        begins_s |= {step: ends_s[step - 1] if step else 0.0 for step in ends_s if not step or step - 1 in ends_s}
    return {step: (begins_s[step], end_s) for step, end_s in ends_s.items()}


def piece_durations(timeline: Timeline, step: int) -> dict[tuple[Op, str], np.ndarray]:
    """What each piece of a step costs, read from a step in which the pieces ran one after the other.

    A collective lasts from start to end. Everything else lasts from the end of whatever its rank did before, because
    on a CPU the host's own time (Python, waking up, another rank on the same core) belongs to the piece it delays.
    An operation that occurs several times in a step counts with its mean.

    Returns:
        for each (op, unit) seconds of shape (ranks,), in the order of ``timeline.ranks``.
    """
    import numpy as np

    seen: dict[tuple[Op, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    before_s: dict[int, float] = {}  # of each rank; the first operation of a step has none before it
    for event in timeline.ops:
        if event.step != step:
            continue
        since_s = event.start_s
        if event.rank in before_s and not communicates(event.op, event.lane):
            since_s = min(before_s[event.rank], since_s)
        seen[event.op, event.unit][event.rank].append(event.end_s - since_s)
        before_s[event.rank] = event.end_s
    return {
        key: np.array([float(np.mean(by_rank[rank])) if by_rank[rank] else 0.0 for rank in timeline.ranks])
        for key, by_rank in seen.items()
    }
