"""Who holds what through a training step: a walk along what each rank issues, allocates and frees.

All ranks of a program issue the same, so that one walk says what each holds (see `shard_cells`).

[Note: moments]  A moment begins with an event worth telling (a collective, compute, parameters or gradients freed) and
shows what is held when the next one begins. Memory allocated for an operation counts from that operation on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

from fsdp_sim.timeline import Event, Memory, Op, Phase
from fsdp_sim.viz.shard_maps.cast import COMPUTE, Cast


class Gradient(IntEnum):
    """The whole gradient: none, of this rank's data, reduced but not freed, or the mean over all ranks."""

    NONE, FRESH, SENT, MEAN = range(4)


class Shard(IntEnum):
    """The sharded gradient: none, reduced within the shard group alone, or over all ranks."""

    NONE, GROUP, REDUCED = range(3)


class Holding(NamedTuple):
    """What each rank holds of one band.

    Attributes:
        whole: parameters are gathered. ``slice_of``: a 1/n of them is kept (0: none). ``stale``: only the own shard has
            seen the optimizer.
        gradient: the whole gradient; ``filled`` are the segments it has, where rows are segments.
        shard: the sharded gradient; ``shard_on_cpu``: it was offloaded.
    """

    whole: bool = False
    slice_of: int = 0
    stale: bool = False
    gradient: Gradient = Gradient.NONE
    filled: frozenset[str] = frozenset()
    shard: Shard = Shard.NONE
    shard_on_cpu: bool = False


NONE_HELD = Holding()
LIVING = (Memory.SHARDED, Memory.OPTIMIZER, Memory.RS_OUTPUT, Memory.UNSHARDED, Memory.AG_OUTPUT,
          Memory.UNSHARDED_GRAD, Memory.RS_INPUT)  # fmt: skip
TELLING = frozenset(
    {Op.ALL_GATHER, Op.FWD, Op.RECOMPUTE, Op.BWD, Op.REDUCE_SCATTER, Op.RS_COPY, Op.ALL_REDUCE, Op.OPTIM, Op.BROADCAST}
)


@dataclass(frozen=True)
class HoldingsMoment:
    """One thing worth telling and what is held after it.

    Attributes:
        op: what happens; FREE is a reshard in forward or backward, ``zero_grad`` after the optimizer; None is the rest
            before the step.
        band: whose; empty for the optimizer. ``name``: of the segment, where compute has one.
        holdings: by band; a band not named holds what it does at rest.
        bytes: alive on the rank, by category.
        ahead: of a gather, the name whose compute comes before that of the band gathered.
        adds: a backward adds to the whole gradient that earlier micro-batches left.
        from_slice: a gather of slices kept after forward, over ``group_size`` ranks.
    """

    op: Op | None
    band: str = ""
    name: str = ""
    phase: Phase = Phase.NONE
    micro_batch: int = 0
    group_size: int = 1
    holdings: dict[str, Holding] = field(default_factory=dict, repr=False)
    bytes: dict[Memory, int] = field(default_factory=dict, repr=False)
    ahead: str = ""
    adds: bool = False
    from_slice: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """The same on every rank that does the same."""
        return self.op, self.band, self.name, self.phase, self.micro_batch

    def of(self, band: str) -> Holding:
        return self.holdings.get(band, NONE_HELD)


def moments(cast: Cast, events: Iterable[Event], step: int) -> list[HoldingsMoment]:
    """The moments of one step of one rank, from the rest before it to the rest after it."""
    walk = _Walk(cast)
    found: list[HoldingsMoment] = []
    for event in events:
        if event.step > step:
            break
        if event.op is Op.FREE:  # what was allocated before is not for this
            walk.flush()
        head = walk.head(event) if event.step == step else None
        if event.step == step and not found and event.op is not Op.ALLOC:  # what lives through all steps may come first
            found.append(walk.close(HoldingsMoment(None)))
        if head is not None:
            if len(found) > 1:
                found[-1] = walk.close(found[-1])
            found.append(head)
        walk.take(event)
    if len(found) > 1:
        walk.flush()
        found[-1] = walk.close(found[-1])
        if walk.updated:  # gradients that stay in their buckets are zeroed there
            walk.zero()
            found.append(walk.close(HoldingsMoment(Op.FREE, phase=Phase.OPTIMIZER, micro_batch=found[-1].micro_batch)))
    return list(_with_ahead(found))


def _with_ahead(found: Sequence[HoldingsMoment]) -> Iterator[HoldingsMoment]:
    """Gathers that come before the compute of another band say which."""
    following = ""  # the compute after a moment, by band
    name = ""
    later: list[HoldingsMoment] = []
    for moment in reversed(found):
        if moment.op in COMPUTE:
            following, name = moment.band, moment.name
        early = moment.op is Op.ALL_GATHER and moment.phase is not Phase.OPTIMIZER and following != moment.band
        later.append(replace(moment, ahead=name) if early else moment)
    yield from reversed(later)


class _Walk:
    """Holdings and live bytes of one rank."""

    def __init__(self, cast: Cast) -> None:
        self.cast = cast
        self.bands = {band.name: band for band in cast.bands}
        self.bytes = dict.fromkeys(LIVING, 0)
        self.alive: dict[tuple[Memory, str], int] = {}
        self.held: dict[str, Holding] = {}
        self.deferred: list[Event] = []  # allocations for the operation to come
        self.cloned: dict[str, int] = {}  # bytes of a slice whose whole is still to be freed
        self.last_backward = ""
        self.micro_batch = 0
        self.kept: set[str] = set()  # bands whose whole gradients are left from earlier micro-batches
        self.last_cast = ""  # whose reduced gradient the last operation cast
        self.updated = False  # the optimizer has run, and its gradients are still there

    def head(self, event: Event) -> HoldingsMoment | None:
        """The moment that an event begins, if it is worth telling."""
        band = self.cast.band_of.get(event.unit, event.unit)
        name, op = event.unit, event.op
        if op is Op.FREE:
            held = self.alive.get((event.category, event.unit), 0)
            if event.unit not in self.bands:
                return None
            if event.category is Memory.UNSHARDED:
                if held != event.bytes or self.bands[event.unit].replicated:
                    return None
            elif self.updated and event.category in (Memory.RS_OUTPUT, Memory.UNSHARDED_GRAD):
                band = name = ""
            else:
                return None
        elif op is Op.RS_COPY:
            op = Op.REDUCE_SCATTER
        elif op not in TELLING or not (op in COMPUTE or op is Op.OPTIM or band in self.bands):
            return None
        from_slice = op is Op.ALL_GATHER and self.held.get(band, NONE_HELD).slice_of == event.group_size > 1
        return HoldingsMoment(
            op, band if band in self.bands else "", name, event.phase, event.micro_batch, event.group_size,
            adds=op is Op.BWD and band in self.kept, from_slice=from_slice,
        )  # fmt: skip

    def close(self, moment: HoldingsMoment) -> HoldingsMoment:
        return replace(moment, holdings=dict(self.held), bytes=dict(self.bytes))

    def take(self, event: Event) -> None:
        if event.micro_batch != self.micro_batch:
            self.micro_batch = event.micro_batch
            self.kept = {name for name, held in self.held.items() if held.gradient is Gradient.FRESH}
        if event.op is Op.ALLOC:
            if event.category in (Memory.SHARDED, Memory.OPTIMIZER):
                self._count(event, event.bytes)
            else:
                self.deferred.append(event)
            return
        self.flush(event.op)
        if event.op is Op.FREE:
            self._free(event)
        else:
            self._operate(event)

    def flush(self, before: Op | None = None) -> None:
        """Count what was allocated for the operation that comes now; a cast of a reduced gradient is no new one."""
        for event in self.deferred:
            self._count(event, event.bytes)
            if event.category is Memory.UNSHARDED and event.unit in self.bands:
                self._set(event.unit, whole=True)
            if (
                event.category is Memory.UNSHARDED_GRAD
                and not self._is_bucket(event.unit)
                and before is not Op.GRAD_CAST
            ):
                self._set(event.unit, gradient=Gradient.FRESH)
        self.deferred.clear()

    def zero(self) -> None:
        """What ``zero_grad`` does to gradients."""
        for name in self.bands:
            self._set(name, gradient=Gradient.NONE, filled=frozenset(), shard=Shard.NONE, shard_on_cpu=False)
        self.updated = False

    def _set(self, name: str, **changes: Any) -> None:
        if name in self.bands:
            self.held[name] = self.held.get(name, NONE_HELD)._replace(**changes)

    def _count(self, event: Event, n_bytes: int) -> int:
        key = (event.category, event.unit)
        self.alive[key] = self.alive.get(key, 0) + n_bytes
        if event.category in self.bytes:
            self.bytes[event.category] += n_bytes
        return self.alive[key]

    def _is_bucket(self, name: str) -> bool:
        return name in self.bands and self.bands[name].replicated

    def _free(self, event: Event) -> None:
        left, name = self._count(event, -event.bytes), event.unit
        match event.category:
            case Memory.UNSHARDED:
                if name in self.cloned:
                    self._set(name, slice_of=round(event.bytes / max(self.cloned.pop(name), 1)))
                if left <= 0:
                    self._set(name, whole=False)
            case Memory.AG_OUTPUT:
                if not self.alive.get((Memory.UNSHARDED, name)):
                    self._set(name, whole=False)
            case Memory.SHARDED:
                self._set(name, slice_of=0)
            case Memory.UNSHARDED_GRAD | Memory.RS_INPUT:
                if not self._whole_gradient(name):
                    self._set(name, gradient=Gradient.NONE, filled=frozenset())
            case Memory.RS_OUTPUT:
                offloaded = self.held.get(name, NONE_HELD).shard_on_cpu
                if left <= 0 and (not offloaded or not event.bytes):
                    self._set(name, shard=Shard.NONE, shard_on_cpu=False)
        if self.updated and event.category in (Memory.RS_OUTPUT, Memory.UNSHARDED_GRAD) and name in self.bands:
            self.zero()

    def _operate(self, event: Event) -> None:
        name = event.unit
        match event.op:
            case Op.ALL_GATHER:
                self._set(name, whole=not self._is_bucket(name), stale=False)
            case Op.CLONE:
                self.cloned[name] = event.bytes
            case Op.BWD:
                self.last_backward = name
            case Op.RS_COPY_IN | Op.ACCUMULATE if self._is_bucket(name) and self.last_cast != name:
                filled = self.held.get(name, NONE_HELD).filled | {self.last_backward}
                self._set(name, gradient=Gradient.FRESH, filled=filled)
            case Op.REDUCE_SCATTER | Op.RS_COPY:
                alone = self.cast.replicas == 1 or self._is_bucket(name)
                left = Gradient.SENT if self._whole_gradient(name) else Gradient.NONE
                self._set(name, shard=Shard.REDUCED if alone else Shard.GROUP, gradient=left)
            case Op.ALL_REDUCE:
                if self.alive.get((Memory.RS_OUTPUT, name)):
                    self._set(name, shard=Shard.REDUCED)
                else:
                    self._set(name, gradient=Gradient.MEAN)
            case Op.D2H:
                whole = self.held.get(name, NONE_HELD).shard is Shard.NONE  # where nothing is cut, all goes
                self._set(name, shard_on_cpu=True, **({"shard": Shard.REDUCED} if whole else {}))
            case Op.OPTIM:
                self.updated = True
                for band in self.cast.bands:
                    if band.replicated and band.shards > 1:
                        self._set(band.name, stale=True)
        self.last_cast = name if event.op is Op.GRAD_CAST else ""

    def _whole_gradient(self, name: str) -> bool:
        """Whether memory of whole gradients is there."""
        return any(self.alive.get((category, name), 0) > 0 for category in (Memory.UNSHARDED_GRAD, Memory.RS_INPUT))
