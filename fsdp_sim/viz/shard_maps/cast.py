"""Who takes part in a step: the bands that are gathered and reduced together, and the ranks that share them.

[Note: bands]  A band is a unit of FSDP, or a bucket of DDP and ZeRO. It is cut into rows: the shards of a unit; under
DDP, which cuts nothing, the segments whose gradients share the bucket.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from msgspec import structs

from fsdp_sim.engine import program_state_bytes
from fsdp_sim.schedule import DTYPE_BYTES, Kind, Program, Unit
from fsdp_sim.schedule.buckets import Reducer
from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.ddp import walk_of
from fsdp_sim.schedule.zero import WholeReducer
from fsdp_sim.spec import OPTIMIZER_STATES, shards_of
from fsdp_sim.timeline import Event, Lane, Memory, Op, Phase, Timeline

COMPUTE = frozenset({Op.FWD, Op.RECOMPUTE, Op.BWD})
CUT = frozenset({Op.ALL_GATHER, Op.REDUCE_SCATTER})  # collectives over the ranks that share one copy
KEPT_WHOLE = frozenset({"ddp", "zero1", "zero2"})


class Act(Protocol):
    """What instructions of a program and events of a timeline have in common."""

    @property
    def op(self) -> Op: ...
    @property
    def unit(self) -> str: ...
    @property
    def bytes(self) -> int: ...
    @property
    def group_size(self) -> int: ...
    @property
    def category(self) -> Memory: ...
    @property
    def step(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def phase(self) -> Phase: ...


@dataclass(frozen=True)
class Band:
    """A unit or bucket.

    Attributes:
        shards: ranks that share one copy; 1 where every rank has it all.
        rows: what it is cut into: numbers of shards, or names of segments.
        row_bytes: of the parameters in each row, where known.
        replicated: a bucket: parameters are whole on every rank all the time (DDP, ZeRO).
        trained: it has gradients and optimizer state.
    """

    name: str
    shards: int
    rows: tuple[str, ...]
    row_bytes: tuple[int, ...] = ()
    replicated: bool = False
    trained: bool = True

    def owns(self, rank: int, row: int) -> bool:
        """Whether a rank keeps and updates a row; where nothing is cut each does."""
        return self.shards == 1 or row == rank % self.shards

    @property
    def by_segment(self) -> bool:
        return self.replicated and self.shards == 1 and bool(self.row_bytes)


@dataclass(frozen=True)
class Cast:
    """The bands and ranks of a step, and what lives through it.

    Attributes:
        band_of: the band of each name that compute has, where it is another.
        replicas: copies of the model (HSDP, DDP).
        offload: shards, gradients and optimizer state rest in the CPU's memory.
        optimizer: whether there is optimizer state; None where nothing says so.
        state_bytes: that live on each rank through all steps, and are in no act.
    """

    bands: tuple[Band, ...]
    ranks: int
    band_of: dict[str, str] = field(default_factory=dict)
    replicas: int = 1
    offload: bool = False
    optimizer: bool | None = True
    state_bytes: dict[Memory, int] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        """Ranks that share one copy."""
        return max((band.shards for band in self.bands), default=1)

    @property
    def keeps_whole(self) -> bool:
        """Parameters are never cut: DDP and ZeRO."""
        return all(band.replicated for band in self.bands)


def cast_of(source: Program | Timeline) -> Cast:
    """The cast of a program, or of what a timeline records.

    Raises:
        TypeError: it is neither.
        ValueError: there is nothing that is gathered, reduced or held.
    """
    if not isinstance(source, (Program, Timeline)):
        raise TypeError(
            f"{source!r} is a {type(source).__name__}; a shard map is made of a Program or a Timeline, for example "
            "simulate(...).program"
        )
    cast = _of_program(source) if isinstance(source, Program) else _of_timeline(source)
    if not cast.bands:
        raise ValueError(
            f"{source!r} has no unit that is gathered, reduced or held in memory, so there is no shard to draw; record "
            "a step of a sharded model, or give the Program of a simulation"
        )
    return cast


def acts_of(source: Program | Timeline, rank: int) -> Sequence[Act]:
    """What a rank does, in the order in which its CPU issues it."""
    if isinstance(source, Program):
        return [i for i in source if i.kind in (Kind.OP, Kind.ALLOC, Kind.FREE)]
    events = [event for event in source if event.rank == rank]
    fills = {Memory.UNSHARDED, Memory.AG_OUTPUT, Memory.UNSHARDED_GRAD, Memory.RS_INPUT}
    return events if any(event.category in fills for event in events) else with_memory(events)


# Of a program


def _of_program(program: Program) -> Cast:
    plan, ranks = program.plan, program.world_size
    shards = shards_of(plan, ranks)
    if plan.api in KEPT_WHOLE:
        bands, band_of = _buckets(program)
    else:
        units = [unit for unit in program.units if unit.params]
        bands = [_unit_band(unit, shards, plan.api == "fsdp1") for unit in units]
        band_of = {segment: unit.name for unit in units for segment in unit.names_of_segments}
    state: dict[Memory, int] = {}
    for (category, _), n_bytes in program_state_bytes(program).items():
        state[category] = state.get(category, 0) + n_bytes
    return Cast(
        tuple(bands), ranks, band_of, ranks // shards, plan.cpu_offload, OPTIMIZER_STATES[plan.optimizer] > 0, state
    )


def _unit_band(unit: Unit, shards: int, flat: bool) -> Band:
    """Cut along dimension 0 of each parameter, or as one flat parameter."""
    row_bytes = [0] * shards
    sizes = [(p.shape[0], math.prod(p.shape[1:]) * DTYPE_BYTES[p.dtype]) for p in unit.params]
    if flat:
        size = DTYPE_BYTES[unit.params[0].dtype]
        sizes = [(sum(rows * each for rows, each in sizes) // size, size)]
    for rows, each in sizes:
        chunk = -(-rows // shards)
        for shard in range(shards):
            row_bytes[shard] += min(max(rows - shard * chunk, 0), chunk) * each
    trained = any(p.requires_grad for p in unit.params)
    return Band(unit.name, shards, tuple(map(str, range(shards))), tuple(row_bytes), trained=trained)


def _buckets(program: Program) -> tuple[list[Band], dict[str, str]]:
    plan, ranks = program.plan, program.world_size
    reducer = Reducer if plan.api == "ddp" else WholeReducer
    bands: list[Band] = []
    band_of: dict[str, str] = {}
    for bucket in reducer(Cpu(), walk_of(program.units), plan, ranks).buckets:
        size = DTYPE_BYTES[bucket.param_dtype]
        if plan.api == "ddp":
            parts = bucket.parts
            bands.append(Band(bucket.name, 1, tuple(parts), tuple(n * size for n in parts.values()), replicated=True))
        else:
            part = bucket.numel // ranks * size
            bands.append(Band(bucket.name, ranks, tuple(map(str, range(ranks))), (part,) * ranks, replicated=True))
        for segment in bucket.parts:
            band_of.setdefault(segment, bucket.name)
    return bands, band_of


# Of a timeline


def _of_timeline(timeline: Timeline) -> Cast:
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
        Band(unit, n, tuple(map(str, range(n))), replicated=whole_at_rest.get(unit, False))
        for unit, n in communicated.items()
    ]
    ranks = max(timeline.header.world_size, len(timeline.ranks), *(band.shards for band in bands), 1)
    most = max((band.shards for band in bands), default=1)
    optimizer = any(event.category is Memory.OPTIMIZER for event in events) or None
    return Cast(tuple(bands), ranks, _bands_of(events, communicated), ranks // most, optimizer=optimizer)


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


def with_memory(events: Sequence[Event]) -> list[Event]:
    """Events of a record that has no memory, with what its collectives and compute imply.

    Parameters are whole from their gather until the last compute that uses them before the next; whole gradients from
    their backward until they are reduced; sharded ones until after the optimizer. Sizes are those of the collectives.
    """

    def change(event: Event, op: Op, category: Memory, unit: str, n_bytes: int) -> Event:
        return structs.replace(event, op=op, category=category, unit=unit, bytes=n_bytes, lane=Lane.COMPUTE)

    gathers = [e for e in events if e.op is Op.ALL_GATHER and e.phase is not Phase.OPTIMIZER]
    owner = _bands_of(events, {e.unit for e in gathers})
    last_use: dict[int, tuple[str, int]] = {}  # place of the last use -> unit and bytes
    size: dict[str, int] = {}
    current: dict[str, int] = {}  # unit -> place of the last use of its whole parameters
    for place, event in enumerate(events):
        unit = owner.get(event.unit, event.unit)
        if event.op is Op.ALL_GATHER and event.phase is not Phase.OPTIMIZER:
            if unit in current:
                last_use[current[unit]] = unit, size[unit]
            current[unit], size[unit] = place, event.bytes
        elif event.op in COMPUTE and unit in current:
            current[unit] = place
    last_use |= {place: (unit, size[unit]) for unit, place in current.items()}
    found: list[Event] = []
    reduced: dict[str, int] = {}  # unit -> bytes of its sharded gradients
    whole: set[str] = set()
    for place, event in enumerate(events):
        unit = owner.get(event.unit, event.unit)
        if event.op is Op.ALL_GATHER and unit in size and event.phase is not Phase.OPTIMIZER:
            found.append(change(event, Op.ALLOC, Memory.UNSHARDED, unit, event.bytes))
        if event.op is Op.BWD and unit in size and unit not in whole:
            whole.add(unit)
            found.append(change(event, Op.ALLOC, Memory.UNSHARDED_GRAD, unit, size[unit]))
        if event.op is Op.REDUCE_SCATTER:
            reduced[unit] = event.bytes // max(event.group_size, 1)
            found.append(change(event, Op.ALLOC, Memory.RS_OUTPUT, unit, reduced[unit]))
        found.append(event)
        if event.op is Op.REDUCE_SCATTER and unit in whole:
            whole.discard(unit)
            found.append(change(event, Op.FREE, Memory.UNSHARDED_GRAD, unit, size[unit]))
        if event.op is Op.OPTIM:
            found += [change(event, Op.FREE, Memory.RS_OUTPUT, u, part) for u, part in reduced.items()]
            reduced.clear()
        if place in last_use:
            unit, n_bytes = last_use[place]
            found.append(change(event, Op.FREE, Memory.UNSHARDED, unit, n_bytes))
    return found
