"""The bytes that cross the link between nodes in a step, from the program that torch's FSDP issues.

Ranks of a collective form a ring: each passes on to the next what it got from the one before, so of a message of M
bytes over N ranks M (N - 1) / N bytes leave each rank in an all-gather or a reduce-scatter, and twice as much in an
all-reduce. A ring over several nodes, whose ranks follow each other, leaves each node once. So each ring that spans
nodes sends over each node's link as much as one of its ranks sends.

[Note: gloo reduce-scatters by all-reduce]  It sends twice what NCCL would: the flight recorder of a step on CPUs
names each reduce-scatter ``gloo:all_reduce``.

Source: NCCL's nccl-tests, PERFORMANCE.md; gloo/docs/algorithms.md.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_sim.schedule import Instruction
from fsdp_sim.timeline import COLLECTIVES, Op
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.measure.simulated import simulated
from labs.wrapping.mesh import is_hybrid

ROUNDS = {Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 1, Op.ALL_REDUCE: 2}
"""How often a message goes round the ring."""

ROUNDS_OF_GLOO = ROUNDS | {Op.REDUCE_SCATTER: 2}


def program_of(config: TrainConfig, place: RankPlace) -> list[Instruction]:
    """The collectives of one step, in the order in which each rank issues them."""
    simulation = simulated(config, config.model_config, place, torch.device("cpu"))
    return [i for i in simulation.program.ops if i.step == 0 and i.op in COLLECTIVES]


def across_bytes(config: TrainConfig, place: RankPlace, *, gloo: bool = True) -> float:
    """Bytes that each node sends to the next in a step.

    Args:
        place: ranks, and those of a node. With hybrid sharding each node is taken to hold one copy.
        gloo: reduce-scatter as gloo does it; else as NCCL.

    Raises:
        ValueError: the nodes are no copies: shard_size is not the number of ranks of a node.
    """
    if is_hybrid(config) and (config.plan.shard_size or place.local_world_size) != place.local_world_size:
        raise ValueError(f"shard_size={config.plan.shard_size}: give the {place.local_world_size} ranks of a node")
    rounds = ROUNDS_OF_GLOO if gloo else ROUNDS
    return sum(_sent(i, rounds[i.op]) for i in _spanning(program_of(config, place), config)) * _rings(config, place)


def _spanning(collectives: Iterable[Instruction], config: TrainConfig) -> list[Instruction]:
    """Those over ranks of several nodes: with hybrid sharding the all-reduces among copies, else all."""
    return [i for i in collectives if i.communicator == "replicate" or not is_hybrid(config)]


def _sent(i: Instruction, rounds: int) -> float:
    return rounds * i.bytes * (i.group_size - 1) / i.group_size


def _rings(config: TrainConfig, place: RankPlace) -> int:
    """Rings that leave a node at once: each of its ranks has one among the copies of its shards."""
    return place.local_world_size if is_hybrid(config) else 1
