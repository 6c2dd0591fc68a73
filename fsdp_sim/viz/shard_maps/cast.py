"""Who takes part in a step: the bands that are gathered and reduced together, and the ranks that share them.

[Note: bands]  A band is a unit of FSDP, or a bucket of DDP and ZeRO, in its parts (`UnitShards`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from fsdp_sim.timeline import Event, Lane, Memory, Op, Phase, Timeline, UnitShards

COMPUTE = frozenset({Op.FWD, Op.RECOMPUTE, Op.BWD})
CUT = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER})  # collectives over the ranks that share one copy


@dataclass(frozen=True)
class Cast:
    """The bands and ranks of a step.

    Attributes:
        band_of: the band of each name that compute has, where it is another.
        optimizer: whether there is optimizer state; None where nothing says so.
    """

    bands: tuple[UnitShards, ...]
    ranks: int
    band_of: dict[str, str] = field(default_factory=dict)
    optimizer: bool | None = True

    @property
    def shards(self) -> int:
        """Ranks that share one copy."""
        return max((band.shards for band in self.bands), default=1)

    @property
    def replicas(self) -> int:
        """Copies of the model (HSDP, DDP)."""
        return self.ranks // self.shards

    @property
    def offload(self) -> bool:
        """Shards, gradients and optimizer state rest in the CPU's memory."""
        return any(band.offloaded for band in self.bands)

    @property
    def keeps_whole(self) -> bool:
        """Parameters are never cut: DDP and ZeRO."""
        return all(band.replicated for band in self.bands)


def cast_of(timeline: Timeline) -> Cast:
    """The cast of what a timeline records: as its header says, or else as its events give away.

    Raises:
        ValueError: there is nothing that is gathered, reduced or held.
    """
    units = timeline.header.units
    if units:
        band_of: dict[str, str] = {}
        for unit in units:
            for segment in unit.segments:
                band_of.setdefault(segment, unit.name)
        return Cast(units, timeline.header.world_size, band_of, any(unit.optimizer_states for unit in units))
    cast = _inferred(timeline)
    if not cast.bands:
        raise ValueError(
            f"{timeline!r} has no unit that is gathered, reduced or held in memory, so there is no shard to draw; "
            "record a step of a sharded model, or give a simulation or its program"
        )
    return cast


def events_of(timeline: Timeline, rank: int, cast: Cast) -> list[Event]:
    """What a rank does, in the order in which its CPU issues it; with what it implies of memory, where none is said."""
    events = [event for event in timeline if event.rank == rank]
    fills = {Memory.UNSHARDED, Memory.AG_OUTPUT, Memory.UNSHARDED_GRAD, Memory.RS_INPUT}
    return events if any(event.category in fills for event in events) else with_memory(events, cast)


def _inferred(timeline: Timeline) -> Cast:
    if not timeline.ranks:
        return Cast((), 0)
    rank = Counter(event.rank for event in timeline).most_common(1)[0][0]
    events = [event for event in timeline if event.rank == rank]
    shards: dict[str, int] = {}
    whole_at_rest: dict[str, bool] = {}
    for event in events:
        if event.op in CUT or event.op is Op.ALL_REDUCE:
            size = event.group_size if event.op in CUT else 1
            shards[event.unit] = max(shards.get(event.unit, 1), size)
            gathers = event.op is Op.ALL_GATHER and event.phase is not Phase.OPTIMIZER
            whole_at_rest[event.unit] = whole_at_rest.get(event.unit, True) and not gathers
        elif event.category in (Memory.UNSHARDED, Memory.AG_OUTPUT) and event.unit:
            whole_at_rest[event.unit] = False
    communicated = {unit: n for unit, n in shards.items() if unit}
    if not communicated:  # one rank: all that holds parameters
        holding = [e.unit for e in events if e.category in (Memory.SHARDED, Memory.UNSHARDED) and e.unit]
        communicated, whole_at_rest = dict.fromkeys(holding, 1), {}
    bands = [
        UnitShards(name=unit, shards=n, replicated=whole_at_rest.get(unit, False)) for unit, n in communicated.items()
    ]
    ranks = max(timeline.header.world_size, len(timeline.ranks), *communicated.values(), 1)
    optimizer = any(event.category is Memory.OPTIMIZER for event in events) or None
    return Cast(tuple(bands), ranks, _bands_of(events, communicated), optimizer)


def _bands_of(events: Iterable[Event], bands: Iterable[str]) -> dict[str, str]:
    """The band of each piece of compute that is not named after one: the unit it lies in, else the one unit (the root)
    that no compute is named after."""
    names = list(dict.fromkeys(event.unit for event in events if event.op in COMPUTE))
    known = set(bands)
    without = [band for band in known if band not in names]
    found: dict[str, str] = {}
    for name in names:
        around = [band for band in known if name.startswith(f"{band}.")]
        if name not in known and (around or len(without) == 1):
            found[name] = max(around, key=len) if around else without[0]
    return found


def with_memory(events: Sequence[Event], cast: Cast) -> list[Event]:
    """Events of a record that has no memory, with what its collectives and compute imply.

    Parameters are whole from their gather until the last compute that uses them before the next; whole gradients from
    their backward until they are reduced; sharded ones until after the optimizer. Sizes are those of the collectives.
    """

    def unit_of(event: Event) -> str:
        return cast.band_of.get(event.unit, event.unit)

    def gathers(event: Event) -> bool:
        return event.op is Op.ALL_GATHER and event.phase is not Phase.OPTIMIZER

    before: dict[int, list[Event]] = defaultdict(list)  # by place
    after: dict[int, list[Event]] = defaultdict(list)

    def add(to: dict[int, list[Event]], place: int, op: Op, category: Memory, unit: str, n_bytes: int) -> None:
        change = {"op": op, "category": category, "unit": unit, "bytes": n_bytes, "lane": Lane.COMPUTE}
        to[place].append(structs.replace(events[place], **change))

    size = {unit_of(event): event.bytes for event in events if gathers(event)}
    used: dict[str, int] = {}  # unit -> place of the last use of its whole parameters
    reduced: dict[str, int] = {}  # unit -> bytes of its sharded gradients
    whole: set[str] = set()  # units that have whole gradients
    for place, event in enumerate(events):
        unit = unit_of(event)
        if gathers(event):
            if unit in used:
                add(after, used[unit], Op.FREE, Memory.UNSHARDED, unit, size[unit])
            add(before, place, Op.ALLOC, Memory.UNSHARDED, unit, size[unit])
            used[unit] = place
        elif event.op in COMPUTE and unit in used:
            used[unit] = place
        if event.op is Op.BWD and unit in size and unit not in whole:
            whole.add(unit)
            add(before, place, Op.ALLOC, Memory.UNSHARDED_GRAD, unit, size[unit])
        elif event.op is Op.REDUCE_SCATTER:
            reduced[unit] = event.bytes // max(event.group_size, 1)
            add(before, place, Op.ALLOC, Memory.RS_OUTPUT, unit, reduced[unit])
            if unit in whole:
                whole.discard(unit)
                add(after, place, Op.FREE, Memory.UNSHARDED_GRAD, unit, size[unit])
        elif event.op is Op.OPTIM:
            for name, n_bytes in reduced.items():
                add(after, place, Op.FREE, Memory.RS_OUTPUT, name, n_bytes)
            reduced.clear()
    for unit, place in used.items():
        add(after, place, Op.FREE, Memory.UNSHARDED, unit, size[unit])
    return [one for place, event in enumerate(events) for one in (*before[place], event, *after[place])]
