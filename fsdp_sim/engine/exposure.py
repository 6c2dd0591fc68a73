"""How much of a step is communication, and how much of that no compute hides; where compute stands idle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fsdp_sim.engine.run import Run
from fsdp_sim.timeline import COLLECTIVES, Interval, Lane, Phase


class Gap(NamedTuple):
    """A time in which a lane has nothing to run.

    Attributes:
        lane: which.
        start_s, end_s: when.
        k: the operation that ends it, by its number; -1 at the end of the step.
    """

    lane: Lane
    start_s: float
    end_s: float
    k: int

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Exposure:
    """What a rank's streams do in one step.

    Attributes:
        step_s: how long it lasts.
        compute_s: the compute lane is busy; its copies count.
        comm_s: a collective is in flight.
        exposed_s: a collective is in flight and the compute lane is not busy.
        by_unit: of ``exposed_s``, in each phase each unit's part. Of two collectives in flight the one that started
            first counts.
        gaps: when the lanes that were used stood idle, in order of time.
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    by_unit: dict[tuple[Phase, str], float]
    gaps: tuple[Gap, ...]

    @property
    def overlap(self) -> float:
        """Part of the communication that compute hides, 0 to 1."""
        return 1.0 - self.exposed_s / self.comm_s if self.comm_s else 0.0


def exposure(run: Run, step: int = -1, rank: int = 0) -> Exposure:
    """What a rank's streams do between the end of the step before and the end of this one; of the last by default.

    Raises:
        ValueError: the program has no such step, or the rank was not played.
    """
    step_s = run.step_time_s(step)
    ends = run.step_ends_s
    step %= len(ends)
    begin, end = ends[step] - step_s, ends[step]
    starts, stops = run.of_rank(run.columns.start_s, rank), run.of_rank(run.columns.end_s, rank)
    compute: list[tuple[float, float, int]] = []
    comm: list[tuple[float, float, int]] = []
    lanes: dict[Lane, list[tuple[float, float, int]]] = {Lane.COMPUTE: compute}
    for k, i in enumerate(run.ops):
        if stops[k] <= begin or starts[k] >= end:
            continue
        span = (max(starts[k], begin), min(stops[k], end), k)
        if i.op in COLLECTIVES:
            comm.append(span)
        lane = i.lane
        if lane is Lane.COMPUTE:
            if i.op not in COLLECTIVES:
                compute.append(span)
        elif not i.async_op:
            lanes.setdefault(lane, []).append(span)  # type: ignore[arg-type]
    comm.sort()
    by_unit: dict[tuple[Phase, str], float] = {}
    comm_s = exposed_s = 0.0
    reached, at = begin, 0
    for start, stop, k in comm:
        start = max(start, reached)
        if stop <= start:
            continue
        reached = stop
        comm_s += stop - start
        while at < len(compute) and compute[at][1] <= start:
            at += 1
        hidden_s, here = 0.0, at
        while here < len(compute) and compute[here][0] < stop:
            hidden_s += min(stop, compute[here][1]) - max(start, compute[here][0])
            here += 1
        if (alone_s := stop - start - hidden_s) > 0:
            i = run.ops[k]
            by_unit[i.phase, i.unit] = by_unit.get((i.phase, i.unit), 0.0) + alone_s
            exposed_s += alone_s
    gaps = [gap for lane, spans in lanes.items() for gap in _gaps(lane, spans, (begin, end))]
    compute_s = sum(stop - start for start, stop, _ in compute)
    return Exposure(step_s, compute_s, comm_s, exposed_s, by_unit, tuple(sorted(gaps, key=lambda gap: gap.start_s)))


def _gaps(lane: Lane, spans: list[tuple[float, float, int]], window: Interval) -> list[Gap]:
    """A lane runs its operations in issue order, so its spans ascend."""
    found = []
    reached = window[0]
    for start, stop, k in spans:
        if start > reached:
            found.append(Gap(lane, reached, start, k))
        reached = max(reached, stop)
    if window[1] > reached:
        found.append(Gap(lane, reached, window[1], -1))
    return found
