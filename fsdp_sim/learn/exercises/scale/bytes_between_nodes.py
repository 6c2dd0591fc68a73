"""What leaves a node in one step, with FSDP over all ranks and with a copy per node."""

from __future__ import annotations

import random

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

UNITS = 4
ROUNDS = {Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 1, Op.ALL_REDUCE: 2}  # how often a message goes round its ring
WAYS = ("fsdp", "fsdp kept", "hsdp")


def bytes_between_nodes(model_bytes, nodes, per_node, how):
    if how == "hsdp":  # per_node rings, one for each shard, each over one rank of every node
        return per_node * 2 * (nodes - 1) / nodes * model_bytes / per_node
    ranks = nodes * per_node
    passes = {"fsdp": 3, "fsdp kept": 2}[how]
    return passes * (ranks - 1) / ranks * model_bytes


def counted(model_bytes: int, nodes: int, per_node: int, how: str) -> float:
    """Over the collectives of the built program whose rings span nodes; each leaves a node once."""
    root, *layers = (Param("weight", (model_bytes // 4 // UNITS,)) for _ in range(UNITS))
    units = [Unit("root", (root,), ("embed", ...)), *(Unit(f"layers.{i}", (p,)) for i, p in enumerate(layers))]
    plan = Plan(reshard_after_forward=how != "fsdp kept", shard_size=per_node if how == "hsdp" else None)
    total = 0.0
    for i in build(units, plan, nodes * per_node).ops:
        if i.op in ROUNDS and (i.communicator == "replicate" or how != "hsdp"):
            rings = per_node if i.communicator == "replicate" else 1
            total += rings * ROUNDS[i.op] * (i.group_size - 1) / i.group_size * i.bytes
    return total


def cases(draw: random.Random) -> list[tuple[int, int, int, str]]:
    return [
        (UNITS * 4 * 1024 * draw.randint(1, 99) * 64, nodes, per_node, how)
        for how in WAYS
        for nodes, per_node in ((2, 4), (draw.choice((4, 8)), 8))
    ]


EXERCISE = Exercise(
    title="Count what leaves a node in one step",
    kind=ExerciseKind.NUMBER,
    difficulty=4,
    importance=4,
    minutes=20,
    contract="Given the bytes of the model (all collectives in this dtype), the nodes, the ranks per node, and how it "
    "is sharded ('fsdp': over all ranks, freed after forward; 'fsdp kept': not freed; 'hsdp': shards inside a node, a "
    "copy per node), return the bytes that each node sends to the next one in a step. Collectives are rings through "
    "consecutive ranks; one micro-batch.",
    reference=bytes_between_nodes,
    why="A ring through all ranks leaves each node once, so a node sends what one of its ranks sends: (W-1)/W of the "
    "model for each of two gathers and a reduction. HSDP gathers and reduce-scatters inside the node; what crosses is "
    "the all-reduce of the gradients, each rank with its own shard: together 2 (n-1)/n of the model. On many nodes "
    "that is a third less than FSDP; the rest of the gain is shorter rings, and one all-reduce for many micro-batches.",
    hints=(
        "Draw 2 nodes of 4 ranks and the ring through all 8. How many of its edges leave a node?",
        "With HSDP, which of its collectives have members on several nodes, how large are they, and how many run at "
        "once from one node?",
        "FSDP: 3 or 2 times (W-1)/W of the model. HSDP: an all-reduce counts twice, (nodes-1)/nodes, of all the shards "
        "of a node.",
    ),
    judge=Numbers(
        truth=counted,
        source="counted over the collectives of the built program",
        cases=cases,
        where="for {model_bytes:,} bytes, {nodes} nodes of {per_node} ranks and {how}",
        unit="bytes",
    ),
    wrong=(
        mutant(
            {"per_node * 2 * (nodes - 1) / nodes * model_bytes / per_node": "0"},
            "the copies must stay alike: their gradients are all-reduced between nodes",
        ),
        mutant({"per_node * 2 *": "2 *"}, "each rank of a node has a ring of its own for its shard: count all"),
        mutant(
            {"per_node * 2 *": "per_node *"}, "an all-reduce is a reduce-scatter and an all-gather: it counts twice"
        ),
        mutant(
            {"(nodes - 1) / nodes": "(nodes * per_node - 1) / (nodes * per_node)"},
            "HSDP's all-reduce is among one rank of each node: its ring has as many members as there are nodes",
        ),
        mutant({'"fsdp": 3': '"fsdp": 2'}, "what was freed after forward is gathered again in backward"),
    ),
    shortcuts=(Wrong(lambda model_bytes, nodes, per_node, how: 2 * model_bytes, "expected"),),
    covers=("coverage 001.51", "coverage 001.20"),
)
