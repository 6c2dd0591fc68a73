"""The mini-FSDP's small siblings: what came before it. In this order:

    buckets    gradients communicated while backward runs
    ddp        DistributedDataParallel: whole models, gradients averaged in buckets
    zero       ZeRO-1 and ZeRO-2: the optimizer's state sharded, then the gradients too
    flat       FSDP1: one flat parameter per unit, whose shards cut across parameters
    collectives, watch   the communication and the compute of all of these, in the timeline

Each trains exactly as one process with the whole batch does, and writes the same timeline as the mini.
"""

from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from fsdp_sim.mini.siblings.ddp import DistributedDataParallel
from fsdp_sim.mini.siblings.flat import FlatParameterFSDP
from fsdp_sim.mini.siblings.watch import watch
from fsdp_sim.mini.siblings.zero import ZeroOptimizer

__all__ = [
    "BackwardPrefetch", "DistributedDataParallel", "FlatParameterFSDP", "ShardingStrategy", "ZeroOptimizer", "watch",
]  # fmt: skip
