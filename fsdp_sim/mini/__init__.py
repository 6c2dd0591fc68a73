"""torch's FSDP2 `fully_shard` in miniature: read api, state, group, param, collectives, in that order.

    api          what you call: `fully_shard`, and the methods a sharded module gains
    state        one per module: the hooks that decide *when* something happens in forward and backward
    group        one per module with parameters: *what* happens; unshard, reshard, reduce. One group = one "unit"
    param        one per parameter: its shapes, and the memory behind them
    collectives  functions over lists of parameters: the copies and the collectives

What not every step needs has a short file of its own:

    modules       which parameters one call manages         init       weights of models built on the meta device
    streams       GPU streams, and what stands in on CPU    prefetch   who issues the next all-gather, and when
    comm_context  what the units under one root share       reduction  what follows a reduce-scatter
    precision     dtypes, and who divides by the ranks      hsdp       meshes: shard and replicate; smaller ones
    accumulation  what a micro-batch communicates           offload    shards and gradients in host memory
    autograd      hooks in backward, and `torch.func`       extensions float8 and others: what is gathered instead
    labels        what they tell torch's profiler and log

Nothing above knows of timelines: `observer` is attached from outside while one is recorded, and writes it in the terms
of `recording`.

Each layer talks only to the one below it. Names, order of operations and errors are those of
`torch.distributed.fsdp._fully_shard` (torch 2.13), so what you learn here you can look up there.
"""

from fsdp_sim.packages import need, warn_of_untried_torch

need("fsdp_sim.mini", "torch")

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_sim.mini import observer
from fsdp_sim.mini.api import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.mini.init import init_weights
from fsdp_sim.mini.param import FSDPParam
from fsdp_sim.mini.state import FSDPState
from fsdp_sim.states import ShardedState, TrainingState
from fsdp_sim.timeline import RECORDER

RECORDER.observers.append(observer.attached)
warn_of_untried_torch(torch.__version__)

__all__ = [
    "CPUOffloadPolicy", "FSDPModule", "FSDPParam", "FSDPParamGroup", "FSDPState", "MixedPrecisionPolicy",
    "OffloadPolicy", "ShardedState", "TrainingState", "UnshardHandle", "fully_shard", "init_weights",
    "register_fsdp_forward_method", "share_comm_ctx",
]  # fmt: skip
