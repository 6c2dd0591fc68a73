"""What questions of several files of this topic share."""

from __future__ import annotations

import functools
from typing import Any

from fsdp_sim.schedule import Param, Program, Unit, build
from fsdp_sim.spec import Plan

GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup"


@functools.cache
def blocks(layers: int, **settings: Any) -> Program:
    """A step of equal blocks under a root without parameters."""
    units = (Unit(f"layers.{i}", (Param("weight", (64, 4)),)) for i in range(layers))
    return build([Unit("root", segments=("embed", ..., "head")), *units], Plan(**settings), 8)
