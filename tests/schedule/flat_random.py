"""Random units and plans for FSDP1, DDP and ZeRO."""

from __future__ import annotations

from random import Random

from fsdp_sim.schedule import Param, Unit, toy
from fsdp_sim.spec import Plan


def random_units(r: Random) -> list[Unit]:
    """A root and up to four layers: units within units, several segments, frozen and tied parameters, or none."""
    if r.random() < 0.2:
        return toy(r.randint(1, 5))
    dtype = r.choice(("fp32", "fp32", "bf16"))
    frozen = r.random() < 0.4
    units: list[Unit] = []

    def params(segments: list[str]) -> tuple[Param, ...]:
        found = []
        for segment in segments:
            trains = r.choice(("all", "all", "none", "some")) if frozen else "all"
            found += [
                Param(f"{segment}.w{k}", (4, 4), dtype, trains == "all" or (trains == "some" and r.random() < 0.5))
                for k in range(r.choice((0, 1, 1, 2)))
            ]
        if len(segments) > 1 and r.random() < 0.3:
            found.append(Param("tied", (4, 4), dtype, used_by=tuple(sorted(r.sample(segments, 2)))))
        return tuple(found)

    def add(name: str, depth: int) -> None:
        n, has_children = r.choice((1, 1, 1, 2, 3)), depth < 2 and r.random() < 0.25
        segments = [f"{name}.{letter}" for letter in "abc"[:n]] if n > 1 or has_children else [name]
        cut = r.randint(0, len(segments))
        around = (*segments[:cut], ..., *segments[cut:]) if has_children else tuple(segments)
        units.append(Unit(name, params(segments), segments=around))
        for child in range(r.randint(1, 2) if has_children else 0):
            add(f"{name}.sub.{child}", depth + 1)

    before = [f"b{k}" for k in range(r.choice((0, 1, 1, 2)))]
    after = [f"h{k}" for k in range(0 if before and r.random() < 0.3 else r.choice((1, 1, 2)))]
    units.append(Unit("root", params(before + after) if r.random() < 0.85 else (), segments=(*before, ..., *after)))
    for layer in range(r.randint(1, 4)):
        add(f"layers.{layer}", 0)
    return units if any(p.requires_grad for u in units for p in u.params) else random_units(r)


def mixes(units: list[Unit]) -> bool:
    """Frozen and trained parameters in one unit: FSDP1 needs ``use_orig_params``."""
    return any(len({p.requires_grad for p in u.params}) > 1 for u in units)


def random_fsdp1(r: Random, units: list[Unit]) -> tuple[Plan, int]:
    """A plan and a world size.

    Left out with ``use_orig_params``: ``cpu_offload`` and ``NO_SHARD``, with which torch writes gradients and
    parameters back in ways that depend on which of them lie on this rank.
    """
    world_size = r.choice((1, 2, 3, 4, 6, 8, 12, 16))
    strategies = ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD"]
    if mixes(units):
        world_size = max(world_size, 2)
        strategies.remove("NO_SHARD")
    strategy = r.choice(strategies)
    sizes = [n for n in range(2, world_size + 1) if world_size % n == 0] or [1]
    grad_accum = r.choice((1, 1, 2, 3))
    cpu_offload = r.random() < 0.2 and not mixes(units)
    plan = Plan(
        api="fsdp1",
        sharding_strategy=strategy,
        shard_size=r.choice(sizes) if "HYBRID" in strategy else None,
        backward_prefetch=r.choice((None, "BACKWARD_PRE", "BACKWARD_POST", "none")),
        forward_prefetch=r.choice((None, True, True, False)),
        limit_all_gathers=r.choice((True, True, False)),
        param_dtype=r.choice((None, None, "bf16", "fp16", "fp32")),
        reduce_dtype=r.choice((None, None, "bf16", "fp32")),
        grad_accum=grad_accum,
        requires_gradient_sync="last" if cpu_offload and grad_accum > 1 else r.choice((True, "last")),
        activation_checkpointing=r.choice((None, None, "full", 2)),
        cpu_offload=cpu_offload,
    )
    return plan, world_size


def random_whole(r: Random, api: str) -> tuple[Plan, int]:
    """A plan for ``ddp``, ``zero1`` or ``zero2`` and a world size."""
    plan = Plan(
        api=api,
        bucket_cap_mb=r.choice((25.0, 60 / 2**20, 100 / 2**20, 200 / 2**20)),
        param_dtype=r.choice((None, None, "bf16", "fp32")),
        reduce_dtype=r.choice((None, None, "fp32")),
        grad_accum=r.choice((1, 1, 2, 3)),
        requires_gradient_sync=r.choice((True, "last")),
        activation_checkpointing=r.choice((None, None, "full", 2)),
    )
    return plan, r.choice((1, 2, 3, 8))
