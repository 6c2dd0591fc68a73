"""How the parameters of each unit lie on the ranks: what a record says of its units."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.schedule.buckets import Bucket, buckets_of
from fsdp_sim.schedule.tree import walk_of
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import DTYPE_BYTES, OPTIMIZER_STATES, Plan, shards_of
from fsdp_sim.timeline import UnitShards


def unit_shards(units: Sequence[Unit], plan: Plan, world_size: int) -> tuple[UnitShards, ...]:
    """Of each unit that has parameters, or of each bucket of DDP and ZeRO, how it is cut."""
    shards, states = shards_of(plan, world_size), OPTIMIZER_STATES[plan.optimizer]
    if plan.api in ("fsdp1", "fsdp2"):
        return tuple(_of_unit(unit, plan, shards, states) for unit in units if unit.params)
    return tuple(_of_bucket(bucket, shards, states) for bucket in buckets_of(walk_of(units), plan, world_size))


def _of_unit(unit: Unit, plan: Plan, shards: int, states: int) -> UnitShards:
    """FSDP2 cuts each parameter along dimension 0, FSDP1 the flat parameter of the unit."""
    rows: dict[int, int] = {}
    shared_out = unit.exchange is not None and plan.expert_parallel > 1
    for p in unit.params:
        n = p.shape[0]
        if shared_out and n < shards:  # fewer experts than ranks: cut along dimension 1
            n *= p.shape[1]
        rows[n] = rows.get(n, 0) + p.bytes // n
    if plan.api == "fsdp1":
        size = DTYPE_BYTES[unit.params[0].dtype]
        rows = {sum(p.bytes for p in unit.params) // size: size}
    trained = any(p.requires_grad for p in unit.params)
    return UnitShards(
        name=unit.name, segments=unit.names_of_segments, shards=shards, rows=tuple(rows.items()), trained=trained,
        optimizer_states=states * trained, offloaded=plan.cpu_offload, apart=plan.expert_parallel if shared_out else 1,
    )  # fmt: skip


def _of_bucket(bucket: Bucket, shards: int, states: int) -> UnitShards:
    """DDP cuts nothing, ZeRO the flat bucket."""
    size = DTYPE_BYTES[bucket.param_dtype]
    cut = shards > 1
    return UnitShards(
        name=bucket.name, segments=tuple(bucket.parts), shards=shards, replicated=True, optimizer_states=states,
        rows=((bucket.numel, size),) if cut else (),
        segment_bytes=() if cut else tuple(n * size for n in bucket.parts.values()),
    )  # fmt: skip
