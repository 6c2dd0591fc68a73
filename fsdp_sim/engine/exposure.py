"""How much of a step is communication, and how much of that no compute hides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import sub

from fsdp_sim.engine.dependencies import shown_lane
from fsdp_sim.engine.kinds import picker
from fsdp_sim.engine.run import Run
from fsdp_sim.schedule import Program
from fsdp_sim.timeline import COLLECTIVES, Lane, Phase


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
    """

    step_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    by_unit: dict[tuple[Phase, str], float]

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
    step %= len(run.step_ends_s)
    found: Exposure | None = run.known.get(("exposure", step, rank))
    if found is None:
        found = run.known["exposure", step, rank] = _exposure(run, step_s, step, rank)
    return found


def _exposure(run: Run, step_s: float, step: int, rank: int) -> Exposure:
    ends = run.step_ends_s
    begin, end = ends[step] - step_s, ends[step]
    starts, stops = run.of_rank(run.columns.start_s, rank), run.of_rank(run.columns.end_s, rank)
    if len(ends) > 1:  # of operations of other steps nothing is left
        starts, stops = ([min(max(time, begin), end) for time in column] for column in (starts, stops))
    what = "comm and compute", run.on_cpu
    comm, of_comm, of_compute = run.program.once_for_all(what, partial(_comm_and_compute, on_cpu=run.on_cpu))
    begun, ended = of_compute(starts), of_compute(stops)
    idle = [(since, until) for since, until in zip([begin, *ended], [*begun, end]) if until > since]  # noqa: B905
    by_unit: dict[tuple[Phase, str], float] = {}
    comm_s = exposed_s = 0.0
    reached, at, last = begin, 0, len(idle)
    for start, stop, k in sorted(zip(of_comm(starts), of_comm(stops), comm, strict=True)):
        if start < reached:
            start = reached
        if stop <= start:
            continue
        reached = stop
        comm_s += stop - start
        while at < last and idle[at][1] <= start:
            at += 1
        here = at
        while here < last and idle[here][0] < stop:
            since, until = idle[here]
            alone_s = (stop if stop < until else until) - (start if start > since else since)
            by_unit[comm[k]] = by_unit.get(comm[k], 0.0) + alone_s
            exposed_s += alone_s
            here += 1
    return Exposure(step_s, sum(map(sub, ended, begun)), comm_s, exposed_s, by_unit)


_Pick = Callable[[Sequence[float]], Iterable[float]]


def _comm_and_compute(program: Program, on_cpu: bool) -> tuple[dict[int, tuple[Phase, str]], _Pick, _Pick]:
    """The collectives, with their phase and unit; what picks them from a column, and what occupies the compute lane."""
    comm: dict[int, tuple[Phase, str]] = {}
    compute: list[int] = []
    for k, i in enumerate(program.ops):
        if i.op in COLLECTIVES:
            comm[k] = i.phase, i.unit
        elif shown_lane(i, on_cpu) is Lane.COMPUTE:
            compute.append(k)
    return comm, picker(list(comm)), picker(compute)
