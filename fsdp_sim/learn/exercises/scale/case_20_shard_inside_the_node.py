"""Right groups, wrong dimension: HSDP that shards across the slow link."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks
from fsdp_sim.learn.judges.account import message_bytes
from fsdp_sim.learn.verdict import Finding, Grade

RANKS, PER_NODE, NUMBERS = 4, 2, 60_000


stub = Edit({'("replicate", "shard")': '("shard", "replicate")'})


def case_20(gradient):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    part = torch.empty(len(gradient) // 2)
    dist.reduce_scatter_tensor(part, gradient, group=mesh.get_group("shard"))
    dist.all_reduce(part, group=mesh.get_group("replicate"))
    return part / dist.get_world_size()


@dataclass(frozen=True)
class BytesAcrossNodes:
    """What each rank puts into collectives whose members are on several nodes.

    Attributes:
        least_bytes: below which no right solution can be.
        per_node: ranks of a node, consecutive.
    """

    least_bytes: int
    per_node: int

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        """Grade the rank with most."""
        crossing = [
            sum(message_bytes(r) for r in records if len({rank // self.per_node for rank in r.members}) > 1)
            for records in ran.records
        ]
        most = max(crossing)
        rank = crossing.index(most)
        if most > 1.01 * self.least_bytes:
            return Finding(
                Grade.NOT_YET,
                f"rank {rank}: expected {self.least_bytes:,} bytes in collectives between nodes, found {most:,}; "
                "reduce inside the node first, so that only a shard is left to cross.",
            )
        return Finding(Grade.OPTIMAL, f"{most:,} bytes in collectives between nodes, one shard, the least possible")


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(NUMBERS, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    mean = torch.stack([gradient for (gradient,) in inputs]).mean(0)
    return [mean.chunk(PER_NODE)[rank % PER_NODE] for rank in range(RANKS)]


def by_node(inputs: Inputs) -> list[torch.Tensor]:
    mean = torch.stack([gradient for (gradient,) in inputs]).mean(0)
    return [mean.chunk(PER_NODE)[rank // PER_NODE] for rank in range(RANKS)]


def means_of_nodes(inputs: Inputs) -> list[torch.Tensor]:
    of_node = torch.stack([gradient for (gradient,) in inputs]).unflatten(0, (-1, PER_NODE)).mean(1)
    return [of_node[rank // PER_NODE].chunk(PER_NODE)[rank % PER_NODE] for rank in range(RANKS)]


def everything_first(gradient):
    dist.all_reduce(gradient)
    return gradient.chunk(2)[dist.get_rank() % 2] / dist.get_world_size()


EXERCISE = Exercise(
    title="Keep the shards inside the node",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=10,
    contract="Ranks 0 and 1 are on one node, 2 and 3 on another. Hybrid sharding (HSDP): each node holds one copy of "
    "the model, of which its first rank keeps the first half and its second rank the second. Each rank is given its "
    "whole gradient; return this rank's half of the mean over all four ranks. This code is slow on the cluster, and "
    "ranks 1 and 2 hold each other's half. Mend it.",
    targets="One shard of each rank goes into collectives between nodes, the least possible.",
    reference=case_20,
    stub=stub,
    why="The dimensions of an HSDP mesh are (replicate, shard): the last one varies fastest, and ranks are numbered "
    "node by node, so a row of the mesh is a node. First reduce-scatter inside the node, where links are fast: each "
    "rank is left with half. Then all-reduce that half with the rank that holds the same one elsewhere. Swapped, "
    "whole gradients cross the slow link.",
    cause="the two dimensions of the mesh are swapped",
    hints=(
        "Draw the mesh of 2 x 2 with ranks 0 to 3 in it. Which ranks share a row? Which share a column?",
        "The collective with the large message belongs on the fast link: ranks of one node.",
        "Only the names of the mesh's dimensions are wrong: torch wants (replicate, shard).",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (by_node, "the mesh's dimensions are swapped: it shards across the nodes, and copies inside them"),
            (means_of_nodes, "it is the mean of this node alone: the copies on other nodes were never added"),
            (
                lambda inputs: [2 * part for part in in_one_process(inputs)],
                "it is twice too large: divide by all ranks, those of the shard group and those of the copies",
            ),
        ),
        checks=(BytesAcrossNodes(NUMBERS // PER_NODE * 4, PER_NODE),),
        abs_=1e-4,
    ),
    wrong=(
        Wrong(stub, "the mesh's dimensions are swapped"),
        mutant(
            {'dist.all_reduce(part, group=mesh.get_group("replicate"))': "", "dist.get_world_size()": "2"},
            "it is the mean of this node alone",
            name="without the copies",
        ),
        mutant({"dist.get_world_size()": "2"}, "it is twice too large", name="divided by the shards"),
        Wrong(everything_first, "reduce inside the node first"),
    ),
    shortcuts=(
        Wrong(lambda gradient: torch.zeros(NUMBERS // 2), "expected"),
        Wrong(lambda gradient: gradient.chunk(2)[dist.get_rank() % 2], "expected"),
    ),
    covers=("pitfall 48", "coverage 002.12", "coverage 001.51"),
    stub_says="the mesh's dimensions are swapped",
)
