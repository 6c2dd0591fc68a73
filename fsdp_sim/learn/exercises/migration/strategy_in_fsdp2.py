"""FSDP1's strategies in FSDP2's words."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import Any

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import toy_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import COLLECTIVES

BLOCKS = 3
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def strategy_in_fsdp2(strategy, nodes, gpus_per_node):
    hybrid = "HYBRID" in strategy
    mesh = [nodes, gpus_per_node] if hybrid else [nodes * gpus_per_node]
    keeps = strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    return {"reshard_after_forward": False if keeps else None, "mesh": mesh}


def issued(plan: Plan, ranks: int) -> Counter[tuple[str, int]]:
    """The collectives of a step, by kind and number of ranks."""
    program = toy_program(BLOCKS, ranks, plan=plan)
    return Counter((str(i.op), i.group_size) for i in program.ops if i.op in COLLECTIVES)


@functools.cache
def as_searched(strategy: str, nodes: int, gpus_per_node: int) -> dict[str, Any]:
    """The setting of FSDP2 whose program has the collectives of FSDP1's, on as many ranks each."""
    ranks = nodes * gpus_per_node
    hybrid = gpus_per_node if "HYBRID" in strategy else None
    old = issued(Plan(api="fsdp1", sharding_strategy=strategy, shard_size=hybrid), ranks)
    settings: Any = itertools.product((None, True, False), ([ranks], [nodes, gpus_per_node]))
    same = [
        {"reshard_after_forward": reshard, "mesh": mesh}
        for reshard, mesh in settings
        if issued(Plan(reshard_after_forward=reshard, shard_size=mesh[-1]), ranks) == old
    ]
    assert len(same) == 1, same
    return same[0]


def cases(draw: random.Random) -> list[tuple[str, int, int]]:
    return [(strategy, draw.randint(2, 4), draw.choice((2, 4, 8))) for strategy in STRATEGIES for _ in range(2)]


EXERCISE = Exercise(
    title="Say a sharding strategy in FSDP2's words",
    kind=ExerciseKind.NUMBER,
    difficulty=3,
    importance=4,
    minutes=10,
    contract="Given a strategy of FSDP1 ('FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD', '_HYBRID_SHARD_ZERO2'), a "
    "number of nodes and of GPUs per node, return {'reshard_after_forward': None, True or False, given to every "
    "fully_shard, the root too; 'mesh': the mesh's shape, [shards] or [replicas, shards]}, so that a step has the "
    "same collectives.",
    reference=strategy_in_fsdp2,
    why="FULL_SHARD frees every unit after forward but the root, which is what None says; True would free the root "
    "too and gather it once more. SHARD_GRAD_OP keeps what it gathered until backward: False. HYBRID is no setting "
    "of FSDP2 but the shape of its mesh: replicas first, shards last, within a node. NO_SHARD has no translation: "
    "that is DDP.",
    hints=(
        "A strategy says two things: whether units are freed after forward, and which ranks share a copy.",
        "The first is reshard_after_forward. The second is the mesh: with two dimensions the last is the shards.",
        "FSDP1 never frees its root after forward; which of None and True is that? And what does ZERO2 keep?",
    ),
    judge=Numbers(
        truth=as_searched,
        source="found by comparing the collectives of the two programs",
        cases=cases,
        where="for {strategy} on {nodes} nodes of {gpus_per_node}",
    ),
    wrong=(
        mutant(
            {"False if keeps else None": "not keeps"}, "True frees the root too, which FSDP1 keeps; None is its rule"
        ),
        mutant(
            {"False if keeps else None": "None"}, "SHARD_GRAD_OP and ZERO2 keep parameters from forward to backward"
        ),
        mutant(
            {"False if keeps else None": "None if keeps else False"},
            "the other way round: FULL_SHARD frees after forward",
        ),
        mutant(
            {"[nodes, gpus_per_node]": "[gpus_per_node, nodes]"},
            "the last dimension of the mesh is the shards, and they stay within a node",
        ),
        mutant(
            {"[nodes, gpus_per_node]": "[nodes * gpus_per_node]"},
            "HYBRID shards within a node and replicates across nodes: two dimensions",
        ),
    ),
    shortcuts=(Wrong(lambda *case: {"reshard_after_forward": None, "mesh": [8]}, "expected"),),
    covers=("coverage 000.15", "coverage 001.51", "coverage 004.91", "misconception 2.9", "misconception 4.125"),
)
