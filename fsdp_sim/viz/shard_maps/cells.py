"""What one rank holds of each row of a band: the cells of a shard map.

A rank's own shard is the one of its place among the ranks that share a copy.
"""

from __future__ import annotations

from enum import IntEnum

from fsdp_sim.timeline import UnitShards
from fsdp_sim.viz.shard_maps.cast import Cast
from fsdp_sim.viz.shard_maps.holdings import Gradient, Holding, Shard


class CellState(IntEnum):
    """What a rank holds of one row, in one of three columns: parameters, gradients, optimizer state."""

    GAP = 0  # no cell
    NOTHING = 1
    EMPTY = 2  # a shard without elements: there are fewer rows than ranks
    OWN = 3  # the parameters this rank keeps and updates
    GATHERED = 4  # a copy of another rank's
    SLICE = 5  # a copy kept between forward and backward (reshard_after_forward=n)
    STALE = 6  # a copy from before the optimizer
    PARTIAL = 7  # a gradient of this rank's own data, like no other rank's
    SENT = 8  # reduced already, its memory not yet free
    GROUP = 9  # a gradient reduced within the shard group, not between replicas
    REDUCED = 10  # a gradient reduced over all ranks
    OPTIMIZER = 11
    ON_CPU = 12


SHARDS = {Shard.GROUP: CellState.GROUP, Shard.REDUCED: CellState.REDUCED}


def cells(cast: Cast, band: UnitShards, held: Holding, rank: int, row: int) -> tuple[CellState, CellState, CellState]:
    """What a rank holds of a row of a band: parameters, gradients, optimizer state."""
    return _parameter(cast, band, held, rank, row), _gradient(band, held, rank, row), _optimizer(cast, band, rank, row)


def _is_empty(band: UnitShards, row: int) -> bool:
    return bool(band.part_bytes) and not band.part_bytes[row]


def _parameter(cast: Cast, band: UnitShards, held: Holding, rank: int, row: int) -> CellState:
    if _is_empty(band, row):
        return CellState.EMPTY if band.owns(rank, row) else CellState.NOTHING
    if band.owns(rank, row):
        return CellState.ON_CPU if cast.offload and not held.whole else CellState.OWN
    if band.replicated:
        return CellState.STALE if held.stale else CellState.GATHERED
    if held.whole:
        return CellState.GATHERED
    if held.slice_of and row * held.slice_of // band.shards == rank % held.slice_of:
        return CellState.SLICE
    return CellState.NOTHING


def _gradient(band: UnitShards, held: Holding, rank: int, row: int) -> CellState:
    if not band.trained or _is_empty(band, row):
        return CellState.NOTHING
    if held.shard is not Shard.NONE and band.owns(rank, row):
        return CellState.ON_CPU if held.shard_on_cpu else SHARDS[held.shard]
    if held.gradient is Gradient.FRESH:
        return CellState.NOTHING if band.segment_bytes and band.parts[row] not in held.filled else CellState.PARTIAL
    return {Gradient.MEAN: CellState.REDUCED, Gradient.SENT: CellState.SENT}.get(held.gradient, CellState.NOTHING)


def _optimizer(cast: Cast, band: UnitShards, rank: int, row: int) -> CellState:
    if not (cast.optimizer and band.trained and band.owns(rank, row)) or _is_empty(band, row):
        return CellState.NOTHING
    return CellState.ON_CPU if cast.offload else CellState.OPTIMIZER
