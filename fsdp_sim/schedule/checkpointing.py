"""Activation checkpointing: which compute runs again in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from fsdp_sim.schedule.unit import Unit, root_of
from fsdp_sim.spec import Plan

SDPA, ROUTER = "scaled_dot_product_attention", "router"


class Policy(NamedTuple):
    """Which operators of a checkpointed block are kept (``MUST_SAVE`` of torch's `CheckpointPolicy`), by their names.

    Attributes:
        every: whose outputs are all kept.
        every_second: of these together, counted through the block, the outputs of the first, third, ... are kept.
        compiled: what nothing needs again is neither kept nor computed again. Eager, what the block puts out last is
            both (torchtitan's ``early_stop = false``; torch's own default stops before it).
    """

    every: frozenset[str] = frozenset()
    every_second: frozenset[str] = frozenset()
    compiled: bool = False

    def keeps(self) -> Callable[[str], bool]:
        """Asked of each operator of a block in turn whether its output is kept."""
        counted = count(1)
        return lambda op: op in self.every or (op in self.every_second and next(counted) % 2 == 1)


def policy_of(plan: Plan) -> Policy:
    """The policy of a plan.

    A router's matmul is not counted and not kept by ``selective`` (torchtitan's
    ``per_op_sac_force_recompute_mm_shapes_by_fqns``). The policy never sees attention of the ``math`` backend, which is
    composed of other operators before.

    Example:
        >>> list(map(policy_of(Plan(activation_checkpointing="selective")).keeps(), ("mm", "mm", SDPA, "addmm")))
        [True, False, True, True]
    """
    asked = plan.activation_checkpointing
    names = {SDPA} if asked == "selective" else set(asked) if isinstance(asked, tuple) else set()
    if plan.attention_impl == "math":
        names.discard(SDPA)
    if "mm" in names:
        names.add(ROUTER)
    return Policy(frozenset(names), frozenset({"mm", "addmm"} if asked == "selective" else ()), plan.compile)


def checkpoints(units: Sequence[Unit], plan: Plan) -> dict[str, tuple[str, ...]]:
    """For each segment that is recomputed, the segments that are recomputed with it, before its backward.

    What is recomputed are blocks: the units other than the root that compute something, and the segments that a unit
    lists as its ``blocks``: a number k means every k-th, beginning with the k-th (torchtitan's layer frequency), all
    else every block. The checkpoint lies inside the unit, around its compute before and after the units inside it, so
    no hook of FSDP runs again. But experts are computed again with their block, as torchtitan puts its
    checkpoint around that: their unit's hooks run again, and their tokens travel again.

    Example:
        >>> from fsdp_sim.schedule import toy
        >>> checkpoints(toy(4), Plan(activation_checkpointing=2))
        {'layers.1': ('layers.1',), 'layers.3': ('layers.3',)}
    """
    every = plan.activation_checkpointing
    if every is None:
        return {}
    blocks = blocks_of(units)
    chosen = blocks[every - 1 :: every] if isinstance(every, int) else blocks
    return {segment: piece for block in chosen for piece in block for segment in piece}


def blocks_of(units: Sequence[Unit]) -> list[tuple[tuple[str, ...], ...]]:
    """The blocks in execution order, each as its pieces: the segments before and those after the units inside."""
    root = root_of(units)

    def own(unit: Unit, segments: tuple[str, ...]) -> list[tuple[tuple[str, ...], ...]]:
        return [((segment,),) for segment in segments if segment in unit.blocks]

    inside: list[tuple[tuple[str, ...], ...]] = []
    experts = [unit for unit in units if unit.exchange]
    for unit in {unit.name: unit for unit in units if unit is not root}.values():
        if own_experts := [e for e in experts if e is not unit and e.name.startswith(f"{unit.name}.")]:
            between = [segment for e in own_experts for segment in e.names_of_segments]
            inside.append(((*unit.before_children(), *between, *unit.after_children()),))
        elif unit.exchange:
            continue
        elif unit.blocks:
            inside += own(unit, unit.names_of_segments)
        elif unit.is_block and unit.names_of_segments:
            inside.append(tuple(piece for piece in (unit.before_children(), unit.after_children()) if piece))
    return [*own(root, root.before_children()), *inside, *own(root, root.after_children())]
