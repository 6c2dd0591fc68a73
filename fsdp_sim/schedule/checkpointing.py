"""Activation checkpointing: which units compute again in backward."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.schedule.unit import Unit, root_of
from fsdp_sim.spec import Plan


def checkpointed_units(units: Sequence[Unit], plan: Plan) -> frozenset[str]:
    """Names of the units whose compute runs again, in part or in whole, at the start of its backward.

    Those are blocks: units other than the root that compute something. ``full`` and ``selective`` mean all of them, a
    number k every k-th, the k-th first (torchtitan's layer frequency). The checkpoint lies inside the unit, around its
    compute before and after the units inside it, so no hook of FSDP runs again.

    Example:
        >>> from fsdp_sim.schedule import toy
        >>> sorted(checkpointed_units(toy(4), Plan(activation_checkpointing=2)))
        ['layers.1', 'layers.3']
    """
    every = plan.activation_checkpointing
    if every is None:
        return frozenset()
    root = root_of(units)
    blocks = list(dict.fromkeys(unit.name for unit in units if unit is not root and unit.names_of_segments))
    return frozenset(blocks[every - 1 :: every] if isinstance(every, int) else blocks)
