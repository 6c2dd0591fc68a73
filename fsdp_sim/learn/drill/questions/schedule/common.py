"""What questions of several files of this topic share."""

from __future__ import annotations

import functools
from typing import Any

from fsdp_sim.schedule import Program, build, toy
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op, Phase

FSDP2 = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, FSDPParamGroup"


FSDP1 = "torch/distributed/fsdp/_runtime_utils.py"


RANKS = 8


BLOCKS = "each of its {} blocks is a unit of FSDP2 (fully_shard), the root unit holds embeddings and head"


SMALL = ("gpt2-1.5b", "llama3-8b", "llama2-13b", "llama3-70b", "gpt3-175b", "llama3-405b")


@functools.cache
def program_of(layers: int, **settings: Any) -> Program:
    """A step of blocks and a root that owns the rest."""
    return build(toy(layers), Plan(**settings), RANKS)


@functools.cache
def counted(op: Op, layers: int, phase: Phase | None = None, **settings: Any) -> int:
    """How many of one collective a step issues: that of three blocks, and what the fourth adds for each further one."""
    three, four = (sum(i.op is op and phase in (None, i.phase) for i in program_of(n, **settings).ops) for n in (3, 4))
    return three + (layers - 3) * (four - three)
