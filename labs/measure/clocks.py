"""Ranks on one clock, and when a collective was on the wire: both follow from what ranks did together.

No rank leaves an all-gather, a reduce-scatter or an all-reduce before the last one has entered it. So each of them
bounds how far two clocks may differ, from both sides, and the shortest ones bound it best (as NTP's round trips do).
What a rank spends in a collective before the last one has entered is no communication: it waits for a late rank.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from fsdp_sim.timeline import Event, Op, Timeline
from fsdp_sim.timeline.analysis import group_number

MEETINGS = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.BARRIER})
"""Collectives that no rank leaves before all have entered."""


class Offset(NamedTuple):
    """What is to be added to a rank's times.

    Attributes:
        seconds: 0 where the clocks may be one and the same.
        uncertain_s: by how much it may be wrong at most, either way.
    """

    seconds: float
    uncertain_s: float


def meetings(timeline: Timeline) -> list[tuple[Event, ...]]:
    """The collectives in which ranks of the timeline met: of each the events, one per rank."""
    seen: Counter[tuple[object, ...]] = Counter()
    met: dict[tuple[object, ...], list[Event]] = defaultdict(list)
    world = timeline.header.world_size
    for event in timeline.ops:
        if event.op in MEETINGS and event.group_size > 1:  # 1 where it is not known who took part
            group = group_number(event.op, event.rank, event.group_size, world)
            what = (event.op, event.unit, event.step, event.group_size, group)
            met[*what, seen[*what, event.rank]].append(event)
            seen[*what, event.rank] += 1
    return [tuple(events) for events in met.values() if len(events) > 1]


def offsets(timeline: Timeline) -> dict[int, Offset]:
    """How far each rank's clock is behind that of the first rank.

    Where one clock for all explains everything that was recorded, all offsets are 0: ranks of one machine share it.
    Else each is in the middle of what is possible.

    Raises:
        ValueError: a rank met no other; no offsets can explain the times (clocks that ran at different speeds).
    """
    ranks = timeline.ranks
    at = {rank: i for i, rank in enumerate(ranks)}
    most = np.full((len(ranks), len(ranks)), np.inf)  # [r, s]: clock s may be behind clock r by so much
    np.fill_diagonal(most, 0.0)
    for events in meetings(timeline):
        who = [at[event.rank] for event in events]
        ends, starts = np.array([e.end_s for e in events]), np.array([e.start_s for e in events])
        bound = ends[:, None] - starts[None, :]
        np.fill_diagonal(bound, 0.0)
        most[np.ix_(who, who)] = np.minimum(most[np.ix_(who, who)], bound)
    shared = bool((most >= 0).all())
    for via in range(len(ranks)):
        most = np.minimum(most, most[:, via : via + 1] + most[via])
    if (np.diagonal(most) < 0).any():
        raise ValueError(
            "the ranks' clocks drifted apart while recording, so no offset between them is right; record fewer steps"
        )
    ahead, behind = most[0], most[:, 0]
    if not np.isfinite(ahead + behind).all():
        alone = [rank for rank in ranks if not np.isfinite(ahead[at[rank]] + behind[at[rank]])]
        raise ValueError(f"ranks {alone} share no collective with rank {ranks[0]}; record whole steps on all ranks")
    seconds = np.zeros(len(ranks)) if shared else (ahead - behind) / 2
    uncertain = np.maximum(seconds + behind, ahead - seconds)
    return {rank: Offset(float(seconds[i]), float(uncertain[i])) for rank, i in at.items()}


def merged(timelines: Sequence[Timeline]) -> tuple[Timeline, float]:
    """The timelines of ranks as one, from 0 on, and by how many seconds the ranks may still be apart on it at most.

    Raises:
        ValueError: as `offsets`.
    """
    header = msgspec.structs.replace(
        timelines[0].header, world_size=max(timeline.header.world_size for timeline in timelines)
    )
    raw = Timeline(header, [event for timeline in timelines for event in timeline])
    found = offsets(raw)
    origin_s = min((event.issue_s + found[event.rank].seconds for event in raw), default=0.0)
    events = [_later(event, found[event.rank].seconds - origin_s) for event in raw]
    return Timeline(header, events), max((offset.uncertain_s for offset in found.values()), default=0.0)


def on_the_wire(timeline: Timeline) -> Timeline:
    """The same, but a collective begins when the last of its ranks has entered it, as it does in the simulator."""
    start_s: dict[tuple[int, int], float] = {}
    for events in meetings(timeline):
        last_s = max(event.start_s for event in events)
        start_s |= {(event.rank, event.seq): last_s for event in events}

    def begun(event: Event) -> Event:
        last_s = start_s.get((event.rank, event.seq), event.start_s)
        return msgspec.structs.replace(event, start_s=min(last_s, event.end_s))

    return Timeline(timeline.header, map(begun, timeline))


def _later(event: Event, by_s: float) -> Event:
    return msgspec.structs.replace(
        event, issue_s=event.issue_s + by_s, start_s=event.start_s + by_s, end_s=event.end_s + by_s
    )
