"""What a recorded step says in one line: what communication cost, what overlapped, where it left the prediction."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass

from fsdp_sim.timeline import COLLECTIVES, Event, Op, Timeline, compare
from fsdp_sim.timeline.analysis import busy_s, computes, exposed_comm_s, overlap, step_time_s
from fsdp_sim.timeline.comparison import Divergence
from fsdp_sim.words import human_ms
from labs.measure.clocks import on_the_wire

COMPUTE = (Op.FWD, Op.BWD, Op.RECOMPUTE)
ROOT = "root"


@dataclass(frozen=True)
class StepSummary:
    """The median step; of each quantity the mean of the ranks. step = computing + exposed + waited + idle.

    Attributes:
        exposed_s: a collective was on the wire, with all of its ranks in it, and nothing computed.
        waited_s: a rank that had nothing to compute was in a collective that another one had not entered yet. The
            simulator's and `fsdp_sim.ranks`' collectives begin when all have entered: there it is part of idle_s.
        overlap: time computing while communicating over time communicating, 0 to 1, on the wire.
        idle_s: a rank neither computed nor was in a collective: Python, waits for the CPU, copies elsewhere.
        collectives: of a step on a rank.
        compared: whether there was a prediction.
        divergence: where the order of collectives and computing first differs from it (a: predicted, b: measured).
    """

    step_s: float
    exposed_s: float
    waited_s: float
    overlap: float
    idle_s: float
    collectives: int
    compared: bool = False
    divergence: Divergence | None = None

    def line(self) -> str:
        """All of it in one sentence."""
        text = (
            f"step {human_ms(self.step_s)}: communication exposed {human_ms(self.exposed_s)}, "
            f"overlap {self.overlap:.0%}, waiting for late ranks {human_ms(self.waited_s)}, "
            f"idle {human_ms(self.idle_s)}"
        )
        if not self.compared:
            return text
        if self.divergence is None:
            return f"{text}; issued as predicted"
        predicted, measured = (event.label if event else "the end" for event in self.divergence[1:3])
        place = f"parts from the prediction at operation {self.divergence.place}"
        return f"{text}; {place}: {predicted} was predicted, {measured} ran"


def summarize(measured: Timeline, predicted: Timeline | None = None) -> StepSummary:
    """A summary of some recorded steps. Of several the first is left out, as the one in which recording began.

    Args:
        measured: all ranks on one clock; of one rank alone it is not known when others were late.
        predicted: the program that this should have been.

    Raises:
        ValueError: nothing was recorded; of the prediction, nothing was predicted.
    """
    steps = sorted({event.step for event in measured.ops})
    if not steps:
        raise ValueError(f"{measured!r} has no operations; there is nothing to sum up")
    steps = steps[1:] or steps
    recorded, wired = _by_step_and_rank(measured), _by_step_and_rank(on_the_wire(measured))
    exposed, waited, overlaps, idle, collectives = [], [], [], [], []
    for step in steps:
        of_ranks = [rank for rank in measured.ranks if (step, rank) in recorded]
        step_s = step_time_s(measured, step)
        on_wire = [exposed_comm_s(wired[step, rank], rank) for rank in of_ranks]
        in_all = [exposed_comm_s(recorded[step, rank], rank) for rank in of_ranks]
        busy = [busy_s(e for e in recorded[step, rank].ops if computes(e.op, e.lane)) for rank in of_ranks]
        exposed.append(statistics.fmean(on_wire))
        waited.append(statistics.fmean(in_all) - exposed[-1])
        idle.append(step_s - statistics.fmean(busy) - statistics.fmean(in_all))
        overlaps.append(statistics.fmean(overlap(wired[step, rank], rank) for rank in of_ranks))
        collectives += [sum(e.op in COLLECTIVES for e in recorded[step, rank].ops) for rank in of_ranks]
    return StepSummary(
        step_s=statistics.median(step_time_s(measured, step) for step in steps),
        exposed_s=statistics.median(exposed),
        waited_s=statistics.median(waited),
        overlap=statistics.median(overlaps),
        idle_s=statistics.median(idle),
        collectives=round(statistics.median(collectives)),
        compared=predicted is not None,
        divergence=first_divergence(predicted, measured) if predicted is not None else None,
    )


def first_divergence(predicted: Timeline, measured: Timeline) -> Divergence | None:
    """Where the order in which a rank issued collectives and computed units first differs from the prediction.

    Of the measurement only what belongs to FSDP or DDP counts: not the loop's own collectives, which have no unit. The
    root's computing has parts whose names differ, and a part that no side knows as a unit is no matter of order.

    Raises:
        ValueError: one of them has nothing of this kind.
    """
    units = {e.unit for e in predicted.ops} & {e.unit for e in measured.ops} - {ROOT, ""}

    def counts(event: Event) -> bool:
        return (event.op in COLLECTIVES and event.unit != "") or (event.op in COMPUTE and event.unit in units)

    return compare(predicted.select(counts), measured.select(counts)).divergence


def _by_step_and_rank(timeline: Timeline) -> dict[tuple[int, int], Timeline]:
    found: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in timeline.ops:
        found[event.step, event.rank].append(event)
    return {key: Timeline(timeline.header, events) for key, events in found.items()}
