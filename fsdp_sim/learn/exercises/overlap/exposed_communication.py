"""Read a timeline: how long does a rank communicate, and how much of that costs time?"""

from __future__ import annotations

import functools
import itertools
import random

from fsdp_sim import simulate
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Timeline
from fsdp_sim.timeline.analysis import communicates, computes, exposed_comm_s, spans_of, total_s, union

GPUS = ("A100-SXM-40GB", "RTX-4090", "H100-SXM-80GB")


def exposed_communication(timeline):
    wire = [(e.start_s, e.end_s) for e in timeline.ops if e.op in ("ALL_GATHER", "REDUCE_SCATTER", "ALL_REDUCE")]
    core = [(e.start_s, e.end_s) for e in timeline.ops if e.lane == "compute"]
    moments = sorted({moment for span in wire + core for moment in span})
    busy = exposed = 0.0
    for start, end in itertools.pairwise(moments):
        if any(a <= start and end <= b for a, b in wire):
            busy += end - start
            if not any(a <= start and end <= b for a, b in core):
                exposed += end - start
    return {"communication_s": busy, "exposed_s": exposed}


def analysed(timeline: Timeline) -> dict[str, float]:
    """By the library."""
    wire = spans_of(e for e in timeline.ops if communicates(e.op, e.lane))
    return {"communication_s": total_s(union(wire)), "exposed_s": exposed_comm_s(timeline, rank=0)}


@functools.cache
def simulated(gpu: str, rows: int, shard_size: int | None) -> Timeline:
    """With a communicator of their own reduce-scatters run beside all-gathers."""
    plan = Plan(
        micro_batch=rows, seq_len=512, param_dtype="bf16", shard_size=shard_size, separate_reduce_scatter_group=True
    )
    return simulate("gpt2-124m", Cluster(gpu, gpus=8), plan).timeline.select(lambda e: not e.is_memory, rank=0)


def cases(draw: random.Random) -> list[tuple[Timeline]]:
    return [(simulated(draw.choice(GPUS), rows, draw.choice((None, 4))),) for rows in (1, 8)]


def of(timeline, kind):
    return spans_of(e for e in timeline.ops if kind(e.op, e.lane))


def summed(timeline: Timeline) -> dict[str, float]:
    communication_s = sum(end - start for start, end in of(timeline, communicates))
    return {"communication_s": communication_s, "exposed_s": exposed_comm_s(timeline, 0)}


def idle(timeline: Timeline) -> dict[str, float]:
    exposed_s = timeline.span_s - total_s(union(of(timeline, computes)))
    return {"communication_s": analysed(timeline)["communication_s"], "exposed_s": exposed_s}


def difference_of_sums(timeline: Timeline) -> dict[str, float]:
    communication_s = analysed(timeline)["communication_s"]
    return {
        "communication_s": communication_s,
        "exposed_s": max(0.0, communication_s - total_s(union(of(timeline, computes)))),
    }


EXERCISE = Exercise(
    title="Find the exposed communication in a timeline",
    kind=ExerciseKind.TRACE,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="Given the Timeline of one rank and one step (its ops have op, lane, unit, start_s and end_s; what runs "
    "on the lane 'compute' computes), return a dict: communication_s, the seconds in which at least one collective "
    "runs, and exposed_s, the seconds of these in which nothing computes.",
    reference=exposed_communication,
    why="An all-gather and a reduce-scatter may run at the same time, so durations may not be added up: what counts is "
    "the time that at least one of them covers. Of that the time that compute covers too is hidden. What is left is "
    "exposed: what a faster network, or a better order, could save.",
    hints=(
        "Two lanes of communication can be busy at once. Think of covered time, not of durations.",
        "Cut time at every start and end: in each piece, every lane is either busy or not.",
        "For each pair of neighbouring moments: is it within a collective? Is it within something on compute?",
    ),
    judge=Numbers(truth=analysed, source="computed from starts and ends", cases=cases, unit="s", rel=1e-6, abs_=1e-9),
    wrong=(
        Wrong(summed, "you added up durations; an all-gather and a reduce-scatter may run at the same time"),
        mutant(
            {'"exposed_s": exposed': '"exposed_s": busy'},
            "you counted what is hidden behind compute too",
            name="all of it",
        ),
        Wrong(idle, "idle is not exposed: a core may also wait with nothing on the wire"),
        Wrong(difference_of_sums, "compute hides only what runs at the same time; a difference of totals cannot know"),
    ),
    shortcuts=(Wrong(lambda timeline: {"communication_s": timeline.span_s, "exposed_s": 0.0}, "expected"),),
    covers=("coverage 002.18", "coverage 000.31"),
)
