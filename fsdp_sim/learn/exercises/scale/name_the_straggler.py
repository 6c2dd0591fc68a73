"""One rank is slow. Which one do the others wait for?"""

from __future__ import annotations

import random
from collections import Counter, defaultdict

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.timeline import Event, Header, Lane, Op, Phase, Timeline

RANKS, UNITS = 8, 12
COLLECTIVE_S, COMPUTE_S = 0.002, 0.010


def name_the_straggler(timeline):
    spent_s = dict.fromkeys(range(8), 0.0)
    for event in timeline.ops:
        if event.op == "ALL_GATHER":
            spent_s[event.rank] += event.end_s - event.start_s
    return min(spent_s, key=lambda rank: spent_s[rank])


def late_most_often(timeline: Timeline) -> int:
    """Who is the last to arrive at most collectives."""
    arrivals = defaultdict[int, list[tuple[float, int]]](list)
    for event in timeline.ops:
        if event.op is Op.ALL_GATHER:
            arrivals[event.seq].append((event.start_s, event.rank))
    return Counter(max(of)[1] for of in arrivals.values()).most_common(1)[0][0]


def traced(draw: random.Random, stops_at: int | None = None) -> Timeline:
    """As a profiler shows it: a rank's all-gather begins when the rank is there, and ends when all have been.

    One rank computes a quarter slower than the others; another one stops once, for long: in a unit that is drawn, or
    in ``stops_at``.
    """
    slow, hiccup = draw.sample(range(RANKS), 2)
    drawn = draw.randrange(2, UNITS - 2)
    stops_at = drawn if stops_at is None else stops_at
    now_s, events = [0.0] * RANKS, list[Event]()
    for unit in range(UNITS):
        end_s = max(now_s) + COLLECTIVE_S
        for rank in range(RANKS):
            computes_s = COMPUTE_S * draw.uniform(0.98, 1.02) * (1.25 if rank == slow else 1.0)
            computes_s += 1.5 * COMPUTE_S * (rank == hiccup and unit == stops_at)
            at = {"rank": rank, "unit": f"layers.{unit}", "phase": Phase.FORWARD, "seq": unit}
            gather = {"op": Op.ALL_GATHER, "lane": Lane.ALL_GATHER, "start_s": now_s[rank], "end_s": end_s}
            forward = {"op": Op.FWD, "lane": Lane.COMPUTE, "start_s": end_s, "end_s": end_s + computes_s}
            events += [Event(**at, **gather), Event(**at, **forward)]  # type: ignore[arg-type]
            now_s[rank] = end_s + computes_s
    return Timeline(Header(producer="model", clock="simulated", world_size=RANKS, title="one rank is slow"), events)


def cases(draw: random.Random) -> list[tuple[Timeline]]:
    """In the last the interrupted rank, and not the slow one, is the last to end."""
    return [(traced(draw),), (traced(draw),), (traced(draw, UNITS - 1),)]


def longest_gap(timeline: Timeline) -> int:
    return max((e for e in timeline.ops if e.op is Op.FWD), key=lambda e: e.end_s - e.start_s).rank


def ends_last(timeline: Timeline) -> int:
    return max(timeline.ops, key=lambda e: e.end_s).rank


def last_to_end(timeline: Timeline) -> int:
    return max((e for e in timeline.ops if e.op is Op.ALL_GATHER), key=lambda e: (e.end_s, e.rank)).rank


EXERCISE = Exercise(
    title="Name the rank that all others wait for",
    kind=ExerciseKind.TRACE,
    difficulty=3,
    importance=4,
    minutes=15,
    contract="Given the Timeline of one step on 8 ranks, as a profiler records it: the bar of an all-gather begins "
    "when its rank has called it, and ends when the data are there. One rank's GPU is a little slower all the time; "
    "another rank was interrupted once. Return the number of the slow rank. (timeline.ops have rank, op, which is "
    "'ALL_GATHER' or 'FWD', unit, start_s and end_s.)",
    reference=name_the_straggler,
    why="A collective ends for all at the same time, so who comes last has the shortest bar and who comes first the "
    "longest. The rank with the most communication is a victim. The straggler is the one with the least, over the "
    "whole step: a single long operation is a hiccup, and hits another rank the next time.",
    hints=(
        "All members of a collective end together. What then decides how long each rank's bar is?",
        "The rank that waits least is the one that the others wait for; look at the sum over the step, not at one bar.",
        "Add up, for each rank, end_s - start_s of its all-gathers, and take the rank with the smallest sum.",
    ),
    judge=Numbers(
        truth=late_most_often,
        source="found as the rank that arrives last at most collectives",
        cases=cases,
        unit="(the rank)",
    ),
    wrong=(
        mutant(
            {"min(spent_s": "max(spent_s"},
            "that rank waits most: long collectives are those of the ranks that came early",
            name="waits longest",
        ),
        Wrong(longest_gap, "that rank had one long operation; the slow one is late at nearly every collective"),
        Wrong(ends_last, "one interruption decides who ends last; the slow rank is late at nearly every collective"),
        Wrong(last_to_end, "all members of a collective end at the same time; look at when they begin"),
    ),
    shortcuts=(Wrong(lambda timeline: -1, "expected"), Wrong(lambda timeline: [3], "a number is asked for")),
    covers=("coverage 003.19",),
)
