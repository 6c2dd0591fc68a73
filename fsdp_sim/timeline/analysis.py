"""Numbers computed from a timeline: step times, exposed communication, overlap, typical durations.

Because issue order and lanes are in the record these are computed, not guessed, and mean the same for a
predicted and a measured run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from fsdp_sim.timeline.kinds import COMM_LANES, Lane, Op
from fsdp_sim.timeline.timeline import Event, Timeline

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points covered by disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(intervals: Iterable[Interval], holes: Iterable[Interval]) -> list[Interval]:
    """The parts of ``intervals`` that no hole covers, disjoint and ascending."""
    rest: list[Interval] = []
    cuts = union(holes)
    for start, end in union(intervals):
        for hole_start, hole_end in cuts:
            if hole_end <= start or hole_start >= end:
                continue
            if hole_start > start:
                rest.append((start, hole_start))
            start = hole_end
        if start < end:
            rest.append((start, end))
    return rest


def total_s(intervals: Iterable[Interval]) -> float:
    """The summed length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def _spans(events: Iterable[Event]) -> list[Interval]:
    return [(e.start_s, e.end_s) for e in events]


def exposed_intervals(timeline: Timeline, rank: int) -> list[Interval]:
    """When a rank's communication lanes were busy and its compute lane was not."""
    mine = [e for e in timeline.ops if e.rank == rank]
    comm = _spans(e for e in mine if e.lane in COMM_LANES)
    return subtract(comm, _spans(e for e in mine if e.lane is Lane.COMPUTE))


def exposed_comm_s(timeline: Timeline, rank: int) -> float:
    """Seconds a rank communicated without computing: the communication that cost time."""
    return total_s(exposed_intervals(timeline, rank))


def overlap(timeline: Timeline, rank: int) -> float:
    """Time computing while communicating over time communicating, 0 to 1 (as Holistic Trace Analysis defines it)."""
    comm_s = total_s(union(_spans(e for e in timeline.ops if e.rank == rank and e.lane in COMM_LANES)))
    return 1.0 - exposed_comm_s(timeline, rank) / comm_s if comm_s else 0.0


def step_time_s(timeline: Timeline, step: int) -> float:
    """From the first operation any rank starts in a step to the last one any rank ends."""
    ops = [e for e in timeline.ops if e.step == step]
    if not ops:
        raise ValueError(f"step {step} has no operations; the steps that have some are {_steps(timeline)}")
    return max(e.end_s for e in ops) - min(e.start_s for e in ops)


def median_step(timeline: Timeline, *, skip: int = 1) -> int:
    """The step of median duration, leaving out the first ``skip`` (caches and allocators are cold in those).

    Raises:
        ValueError: no step has operations.
    """
    steps = _steps(timeline)[skip:] or _steps(timeline)
    if not steps:
        raise ValueError(f"{timeline!r} has no operations, so no typical step")
    return sorted(steps, key=lambda step: step_time_s(timeline, step))[len(steps) // 2]


def _steps(timeline: Timeline) -> list[int]:
    """The steps in which something runs; a step may also have nothing but an alloc or a free."""
    return sorted({e.step for e in timeline.ops})


def piece_durations(timeline: Timeline, step: int) -> dict[tuple[Op, str], np.ndarray]:
    """What each piece of a step costs, read from a step in which the pieces ran one after the other.

    A collective lasts from start to end. Everything else lasts from the end of whatever its rank did before, because
    on a CPU the host's own time (Python, waking up, another rank on the same core) belongs to the piece it delays.
    An operation that occurs several times in a step counts with its mean.

    Returns:
        for each (op, unit) seconds of shape (ranks,), in the order of ``timeline.ranks``.
    """
    seen: dict[tuple[Op, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank in timeline.ranks:
        before_s: float | None = None  # the first operation of a step has none before it
        for event in (e for e in timeline.ops if e.rank == rank and e.step == step):
            since_s = event.start_s
            if before_s is not None and event.lane not in COMM_LANES:
                since_s = min(before_s, since_s)
            seen[event.op, event.unit][rank].append(event.end_s - since_s)
            before_s = event.end_s
    return {
        key: np.array([float(np.mean(by_rank[rank])) if by_rank[rank] else 0.0 for rank in timeline.ranks])
        for key, by_rank in seen.items()
    }
