"""Clocks of several ranks set by each other, where a trace has more than one machine's.

Ranks leave a collective at one moment, or nearly so; and none can leave before the last has come. So of two ranks the
median difference of the ends of what they shared is the difference of their clocks, as long as it lets nobody leave
early. Ranks that share no collective are set by way of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.header import ClockShift
from fsdp_sim.timeline.kinds import Op
from fsdp_sim.timeline.meetings import meetings
from fsdp_sim.timeline.timeline import Timeline

TOGETHER = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.ALL_TO_ALL, Op.BARRIER})
"""Collectives that no rank leaves before every rank has come."""
FEW = 3  # collectives from which on a difference of clocks is believed
DRIFT = 20  # collectives from which on it may change with time
NEAR_S = 20e-6  # clocks that agree so far are left as they are


class _Pair(NamedTuple):
    """What one rank's clock shows less another's, from what they shared."""

    added_s: float
    per_s: float
    within_s: float
    collectives: int


def aligned(timeline: Timeline) -> Timeline:
    """The same with the clocks of its ranks set by collectives; `Header.clocks` says how, and how surely.

    Ranks of one machine have one clock, so where every rank names the same machine nothing is changed; nor where no two
    ranks share three collectives, or clocks agree to 20 us.
    """
    if len(timeline.ranks) < 2 or timeline.header.clock == "simulated" or _one_machine(timeline):
        return timeline
    shared = _shared(timeline)
    shifts = _walk(timeline.ranks, shared)
    if all(abs(shift.added_s) <= NEAR_S and not shift.per_s for shift in shifts.values()):
        return timeline
    begin_s = timeline.start_s

    def moved(time_s: float, shift: ClockShift) -> float:
        return time_s + shift.added_s + shift.per_s * (time_s - begin_s)

    events = [
        msgspec.structs.replace(
            e, **{name: moved(getattr(e, name), shifts[e.rank]) for name in ("issue_s", "start_s", "end_s")}
        )
        if e.rank in shifts
        else e
        for e in timeline.events
    ]
    work = tuple(
        msgspec.structs.replace(w, start_s=moved(w.start_s, shifts[w.rank]), end_s=moved(w.end_s, shifts[w.rank]))
        if w.rank in shifts
        else w
        for w in timeline.header.host_work
    )
    header = msgspec.structs.replace(timeline.header, clocks=tuple(shifts.values()), host_work=work)
    return Timeline(header, events)


def _one_machine(timeline: Timeline) -> bool:
    hosts = timeline.header.hosts
    return set(hosts) == set(timeline.ranks) and len(set(hosts.values())) == 1


def _shared(timeline: Timeline) -> dict[tuple[int, int], list[tuple[Event, Event]]]:
    """For each two ranks the collectives that both were in."""
    found: dict[tuple[int, int], list[tuple[Event, Event]]] = defaultdict(list)
    world_size = max(timeline.header.world_size, max(timeline.ranks) + 1)
    for events in meetings((e for e in timeline.ops if e.op in TOGETHER), world_size):
        first, *others = events
        for other in others:  # by way of the first, so that pairs are as many as ranks
            found[first.rank, other.rank].append((first, other))
    return found


def _walk(ranks: Sequence[int], shared: dict[tuple[int, int], list[tuple[Event, Event]]]) -> dict[int, ClockShift]:
    """What to add to each rank's clock, from the first rank on along those that share most."""
    pairs = {ranks_: _difference(both) for ranks_, both in shared.items() if len(both) >= FEW}
    first = ranks[0]
    found = {first: ClockShift(first, 0.0)}
    while True:
        edges = [
            (pair.collectives, known, new, sign, pair)
            for (a, b), pair in pairs.items()
            for known, new, sign in ((a, b, -1.0), (b, a, 1.0))
            if known in found and new not in found
        ]
        if not edges:
            return {rank: shift for rank, shift in found.items() if rank != first}
        count, known, new, sign, pair = max(edges, key=lambda edge: edge[:1])
        before = found[known]
        found[new] = ClockShift(
            new, before.added_s + sign * pair.added_s, before.per_s + sign * pair.per_s,
            before.within_s + pair.within_s, count,
        )  # fmt: skip


def _difference(both: Sequence[tuple[Event, Event]]) -> _Pair:
    """What the second rank's clock shows less the first's."""
    later = [(b.end_s - a.end_s, a.end_s) for a, b in both]
    added_s, per_s = median(difference for difference, _ in later), 0.0
    if len(later) >= DRIFT:
        later.sort(key=lambda one: one[1])
        half = len(later) // 2
        (early_s, at_s), (late_s, then_s) = (
            [median(column) for column in zip(*some, strict=True)] for some in (later[:half], later[-half:])
        )
        spread_s = median(abs(d - (early_s if at < len(later) // 2 else late_s)) for at, (d, _) in enumerate(later))
        if then_s > at_s and abs(late_s - early_s) > max(NEAR_S, 3 * spread_s):
            per_s = (late_s - early_s) / (then_s - at_s)
            added_s = early_s - per_s * (at_s - min(at for _, at in later))
    begin_s = min(at for _, at in later)
    # Nobody leaves before the other has come: b's clock shows at least so much more, and at most so much.
    least_s = max(b.start_s - a.end_s - per_s * (a.end_s - begin_s) for a, b in both)
    most_s = min(b.end_s - a.start_s - per_s * (a.end_s - begin_s) for a, b in both)
    if least_s <= most_s:
        added_s = min(max(added_s, least_s), most_s)
    within_s = median(abs(d - added_s - per_s * (at - begin_s)) for d, at in later)
    return _Pair(added_s, per_s, within_s, len(both))
