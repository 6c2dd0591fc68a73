"""Collectives as what they are: a meeting of ranks. Which events of several ranks are one collective."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from fsdp_sim.timeline.analysis import group_number
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import COLLECTIVES, Op

Key = tuple[object, ...]


def meetings(ops: Iterable[Event], world_size: int, apart: Mapping[str, int] | None = None) -> list[list[Event]]:
    """The collectives of several ranks, each as the events of those ranks that are at hand, in order of rank.

    Where the trace says the process group and the number of a collective in it, these decide. Else collectives are one
    if they do the same for the same unit in the same part of a step and are as many after the first of that kind; and
    which ranks share them follows from the size of the group, or from its name.

    Args:
        apart: of a unit the distance between ranks of its groups, where that is not 1; see `group_number`.
    """
    found: dict[Key, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for e in ops:
        if e.op in COLLECTIVES:
            found[_key(e, world_size, apart or {})][e.rank].append(e)
    return [
        [events[place] for _, events in sorted(ranks.items()) if place < len(events)]
        for ranks in found.values()
        for place in range(max(map(len, ranks.values())))
    ]


def _key(e: Event, world_size: int, apart: Mapping[str, int]) -> Key:
    """What is the same for a collective on every rank of its group."""
    if e.group and e.turn >= 0:
        return e.op, e.group, e.turn
    if e.group:
        return e.op, e.group, e.unit, e.step, e.micro_batch, str(e.phase)
    number = group_number(
        e.op, e.rank, max(1, e.group_size), world_size, 1 if e.op is Op.ALL_TO_ALL else apart.get(e.unit, 1)
    )
    return e.op, number, e.group_size, e.unit, e.step, e.micro_batch, str(e.phase)
