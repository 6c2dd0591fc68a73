"""The mini-FSDP's small siblings: what came before it, what stands beside it, what it comes down to. In this order:

    function   the shortest correct FSDP: an autograd function whose forward is an all-gather and whose backward is a
               reduce-scatter. Nothing overlaps: the numerical reference
    twins      three training loops that differ in a few marked lines: no overlap, forward prefetch, backward prefetch
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
from fsdp_sim.mini.siblings.function import FSDPUnit, whole_parameters
from fsdp_sim.mini.siblings.twins import TWINS, Layer, backward_prefetch, forward_prefetch, naive
from fsdp_sim.mini.siblings.watch import watch
from fsdp_sim.mini.siblings.zero import ZeroOptimizer

__all__ = [
    "TWINS", "BackwardPrefetch", "DistributedDataParallel", "FSDPUnit", "FlatParameterFSDP", "Layer",
    "ShardingStrategy", "ZeroOptimizer", "backward_prefetch", "forward_prefetch", "naive", "watch", "whole_parameters",
]  # fmt: skip
