"""Random units and plans, from a `random.Random`: what the tests compare with torch and verify."""

from __future__ import annotations

from random import Random
from typing import Any

from fsdp_sim.schedule import Param, Unit
from fsdp_sim.spec import Plan

SHAPES = [(1,), (3, 2), (4, 4), (8, 4), (5,), (17, 3)]


def random_units(chosen: Random, max_layers: int = 5) -> list[Unit]:
    """A root and layers with something to train: frozen, of other dtypes, tied, parameterless, nested, in segments."""
    frozen = chosen.choice([0.0, 0.0, 0.3])

    def params(segments: tuple[str, ...], most: int = 2) -> tuple[Param, ...]:
        made = []
        for segment in segments:
            for n in range(chosen.randint(0, most)):
                trains = chosen.random() >= frozen
                dtype = "fp32" if trains else chosen.choice(["fp32", "bf16"])
                made.append(Param(f"{segment}.p{n}", chosen.choice(SHAPES), dtype, trains))
        if len(segments) > 1 and chosen.random() < 0.3:  # its place is the first segment's
            tied = tuple(chosen.sample(segments, 2))
            home = min(segments.index(s) for s in tied)
            at = sum(segments.index(p.name.removesuffix(".p0").removesuffix(".p1")) <= home for p in made)
            made.insert(at, Param("tied", chosen.choice(SHAPES), used_by=tied, requires_grad=chosen.random() >= frozen))
        return tuple(made)

    layers: list[Unit] = []
    for i in range(chosen.randint(0, max_layers)):
        name = f"layers.{i}"
        kind = chosen.choice(["plain", "plain", "plain", "two segments", "nested", "empty"])
        if kind == "plain":
            layers.append(Unit(name, params((name,))))
        elif kind == "two segments":
            segments = (f"{name}.attn", f"{name}.mlp")
            layers.append(Unit(name, params(segments), segments))
        elif kind == "empty":
            layers.append(Unit(name))
        else:
            before, after = f"{name}.in", f"{name}.out"
            around = chosen.choice([(before, ..., after), (before, ...), (..., after), (...,)])
            own = tuple(s for s in around if s is not ...)
            layers.append(Unit(name, params(own), around))
            layers += [Unit(f"{name}.inner{k}", params((f"{name}.inner{k}",))) for k in range(chosen.randint(1, 2))]
    around = chosen.choice([("embed", ..., "head")] * 3 + [("embed", ...), (..., "head"), (...,)])
    own = tuple(s for s in around if s is not ...)
    root = Unit("root", params(own), around)
    layers.insert(0, Unit("first", params(("first",), 1)))
    layers.append(Unit("trained", (Param("weight", (4, 4)),)))  # so that there is a backward
    return [root, *layers]


def with_repeats(chosen: Random, units: list[Unit]) -> list[Unit]:
    """The same units, some of which run again somewhere else in the forward."""
    parents = [u.name for u in units[1:] if u.is_root]
    alone = [u for u in units[1:] if not u.is_root and not any(u.name.startswith(f"{p}.") for p in parents)]
    units = list(units)
    for _ in range(chosen.randint(1, 3)):
        units.insert(chosen.randint(1, len(units)), chosen.choice(alone))
    return units


def random_plan(chosen: Random, world_size: int) -> Plan:
    """Any plan for fsdp2 that these ranks can carry out; most fields at their defaults."""
    fields: dict[str, Any] = {}

    def maybe(name: str, *values: Any, chance: float = 0.35) -> Any:
        if chosen.random() < chance:
            fields[name] = chosen.choice(values)
        return fields.get(name)

    factors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    shards = maybe("shard_size", *factors) or world_size
    maybe("reshard_after_forward", True, False, *[n for n in factors if shards % n == 0], chance=0.6)
    maybe("forward_prefetch", 1, 2, 3)
    maybe("backward_prefetch", 1, 2, 3)
    maybe("param_dtype", "bf16", "fp16")
    maybe("reduce_dtype", "fp32", "bf16", "fp16")
    maybe("cpu_offload", True, chance=0.2)
    maybe("activation_checkpointing", "full", "selective", 1, 2, chance=0.25)
    if maybe("grad_accum", 2, 3, chance=0.6):
        for name in ("requires_gradient_sync", "requires_all_reduce", "reshard_after_backward", "is_last_backward"):
            maybe(name, "last")
    maybe("reduce_scatter_max_input_buffers", 2, 3, chance=0.2)
    maybe("separate_reduce_scatter_group", True, chance=0.2)
    maybe("post_optim_event", True, chance=0.2)
    maybe("unshard_async_op", True, chance=0.2)
    maybe("gradient_divide_factor", 3.0, float(world_size), 4.0, chance=0.15)
    maybe("clip_grad_norm", True, chance=0.15)
    return Plan(**fields)
