"""How much of a step is communication, and how much of that no compute hides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fsdp_sim.engine.run import Run
from fsdp_sim.schedule import Instruction
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
    ends = run.step_ends_s
    step %= len(ends)
    begin, end, alone = ends[step] - step_s, ends[step], len(ends) == 1
    starts, stops = run.of_rank(run.columns.start_s, rank), run.of_rank(run.columns.end_s, rank)

    def spans(ops: Iterable[int]) -> list[tuple[float, float, int]]:
        if alone:
            return [(starts[k], stops[k], k) for k in ops]
        found = [(starts[k], stops[k], k) for k in ops if stops[k] > begin and starts[k] < end]
        return [(max(start, begin), min(stop, end), k) for start, stop, k in found]

    comm_ops, compute_ops = run.program.once("comm and compute", lambda: _comm_and_compute(run.ops))
    comm, compute = spans(comm_ops), spans(compute_ops)
    comm.sort()
    by_unit: dict[tuple[Phase, str], float] = {}
    comm_s = exposed_s = 0.0
    reached, at, last = begin, 0, len(compute)
    for start, stop, k in comm:
        if start < reached:
            start = reached
        if stop <= start:
            continue
        reached = stop
        comm_s += stop - start
        while at < last and compute[at][1] <= start:
            at += 1
        hidden_s, here = 0.0, at
        while here < last:
            begun, ended, _ = compute[here]
            if begun >= stop:
                break
            hidden_s += (stop if stop < ended else ended) - (start if start > begun else begun)
            here += 1
        if (alone_s := stop - start - hidden_s) > 0:
            i = run.ops[k]
            by_unit[i.phase, i.unit] = by_unit.get((i.phase, i.unit), 0.0) + alone_s
            exposed_s += alone_s
    compute_s = sum([stop - start for start, stop, _ in compute])
    return Exposure(step_s, compute_s, comm_s, exposed_s, by_unit)


def _comm_and_compute(ops: Sequence[Instruction]) -> tuple[list[int], list[int]]:
    """The collectives, and what occupies the compute lane."""
    comm = [k for k, i in enumerate(ops) if i.op in COLLECTIVES]
    return comm, [k for k, i in enumerate(ops) if i.lane is Lane.COMPUTE and i.op not in COLLECTIVES]
