"""`build`: from units and a plan to the program of a training step, whichever way the plan shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter

from fsdp_sim.schedule.ddp import build_ddp
from fsdp_sim.schedule.fsdp1 import build_fsdp1
from fsdp_sim.schedule.fsdp2 import build_fsdp2
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.resized import resized
from fsdp_sim.schedule.unit import Unit, root_of
from fsdp_sim.schedule.zero import build_zero
from fsdp_sim.spec import Plan

BUILDERS: dict[str, Callable[..., Program]] = {  # by Plan.api
    "fsdp2": build_fsdp2,
    "fsdp1": build_fsdp1,
    "ddp": build_ddp,
    "zero1": build_zero,
    "zero2": build_zero,
}
NOT_ISSUED = frozenset(
    {"micro_batch", "seq_len", "compile", "attention_impl", "cross_entropy", "held_logits", "loss_metrics",
     "loss_chunks", "float32_matmul_precision", "optimizer_impl", "save_every", "async_save", "storage_gb_per_s",
     "stack", "rms_norm", "experts_impl", "use_reentrant"}
)  # fmt: skip
"""Fields of a plan that change what is computed, and not what is issued."""
_issued = attrgetter(*[f.name for f in fields(Plan) if f.name not in NOT_ISSUED | {"activation_checkpointing"}])
MOST_KEPT = 200_000  # instructions of programs that are kept for those who ask again: some 100 MB

_Kept = dict[tuple[object, ...], tuple[Sequence[Unit], Program]]  # the last to be asked for stands last
_kept: _Kept = {}
_shapes: _Kept = {}  # for some number of ranks: see `fsdp_sim.schedule.resized`


def build(units: Sequence[Unit], plan: Plan, world_size: int, steps: int = 1) -> Program:
    """The program that torch issues for these units under this plan.

    It is built once for the same tuple of units and for plans that differ in nothing that is issued; and for numbers of
    ranks for which nothing but sizes differs.

    Args:
        units: exactly one root and its layers in execution order. The root is the first that has ``...`` in its
            segments, or the only unit; the units inside another one with ``...`` are those whose names begin with its
            name and a dot. A unit without parameters issues compute alone. One that is there several times (the same
            object, under fsdp2) runs several times in a forward.
        plan: how they are trained; ``plan.api`` says by what.
        world_size: ranks that train together. 1 issues no collectives.
        steps: optimizer steps.

    Raises:
        ValueError: no root or several, a name used twice, nothing to train, a number below 1, or a plan that
            these ranks cannot carry out.

    Example:
        >>> from fsdp_sim.schedule import toy
        >>> program = build(toy(layers=3), Plan(), world_size=8)
        >>> print(*program.lines()[:4], sep="\\n")
        --- step 0 microbatch 0: forward
        wait_stream ag_copy_in      compute
        wait_stream all_gather      compute
        hook        -               pre_forward(root)
    """
    if not isinstance(units, tuple) or not isinstance(plan, Plan):  # which somebody may change meanwhile
        return _build(units, plan, world_size, steps)
    settings = (*_issued(plan), _computed_again(plan))
    issued = (id(units), steps, *settings, *map(type, (world_size, steps, *settings)))  # True is not 1
    key = world_size, *issued
    found = _kept.pop(key, None)
    if found is None:
        alike = _shapes.pop(issued, None)
        made = alike and resized(alike[1], plan, world_size, steps, _build)
        found = units, made or _build(units, plan, world_size, steps)
        _make_room(_shapes)
        _shapes[issued] = alike if alike and made else found
        _make_room(_kept)
    _kept[key] = found
    return found[1].for_plan(plan)


def _make_room(kept: _Kept) -> None:
    while sum([len(program) for _, program in kept.values()]) > MOST_KEPT:
        del kept[next(iter(kept))]


def _computed_again(plan: Plan) -> int | str | None:
    """Of checkpointing what is issued: what a block keeps of its operators is not, unless it is copied."""
    again = plan.activation_checkpointing
    return again if again is None or isinstance(again, int) else "full" if not plan.activation_offload else str(again)


def _build(units: Sequence[Unit], plan: Plan, world_size: int, steps: int) -> Program:
    _validate(units, plan, world_size, steps)
    return BUILDERS[plan.api](units, plan, world_size, steps)


def _validate(units: Sequence[Unit], plan: Plan, world_size: int, steps: int) -> None:
    """What is wrong whichever way the plan shards."""
    for what, value in (("world_size", world_size), ("steps", steps)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a whole number >= 1")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is {plan!r}; it must be a Plan, for example Plan(forward_prefetch=1)")
    root = root_of(units)
    for unit in units:
        if unit is not root and unit.is_root and not any(u.name.startswith(f"{unit.name}.") for u in units):
            raise ValueError(
                f"unit {unit.name} has ... in its segments, but no unit's name begins with {unit.name + '.'!r}, and "
                f"the root is {root.name}; remove the ..., or name the units inside it so"
            )
    by_name: dict[str, Unit] = {}
    for unit in units:
        if by_name.setdefault(unit.name, unit) is not unit:
            raise ValueError(
                f"two units have the unit name {unit.name!r}; each needs its own name (the same object twice is a unit "
                f"that runs twice)"
            )
    if len(by_name) < len(units):
        _validate_runs(units, plan)
    segments = [s for u in by_name.values() for s in u.names_of_segments]
    if len(set(segments)) < len(segments):
        twice = next(n for n in segments if segments.count(n) > 1)
        raise ValueError(f"two units have the segment name {twice!r}; each segment needs its own name")
    if not any(p.requires_grad for u in units for p in u.params):
        if plan.freeze:
            raise ValueError(
                f"Plan.freeze is {plan.freeze!r}, which is all that there is to train; name less, or leave it None"
            )
        raise ValueError(f"none of the {len(units)} units has a parameter that requires gradients; nothing to train")
    if plan.expert_parallel > 1 and not any(unit.exchange for unit in units):
        raise ValueError(
            f"Plan.expert_parallel is {plan.expert_parallel}, and no unit has experts that ranks could share out "
            f"(Unit.exchange); leave it 1"
        )
    shard_size = plan.shard_size
    if shard_size is not None and world_size % shard_size:
        raise ValueError(
            f"Plan.shard_size is {shard_size}, which does not divide the world size {world_size}; "
            f"it must be one of {', '.join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)}, or None"
        )


def _validate_runs(units: Sequence[Unit], plan: Plan) -> None:
    """Some units are there several times."""
    twice = next(u for u in units if sum(other is u for other in units) > 1)
    if plan.activation_offload:
        raise ValueError(
            f"Plan.activation_offload is {plan.activation_offload!r}, and unit {twice.name} is there twice, and which "
            f"of its runs a copy is of is not told apart; make it None"
        )
    if plan.api != "fsdp2":
        raise ValueError(f"unit {twice.name} is there twice; only programs of fsdp2 have units that run several times")
    around = [u.name for u in units if u.is_root and sum(other is u for other in units) > 1]
    if around:
        raise ValueError(f"unit {around[0]} is there twice and has units inside; only a unit without can run twice")
