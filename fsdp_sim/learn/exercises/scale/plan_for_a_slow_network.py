"""Choose how to shard over nodes that are far apart."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges.plans import BestPlan
from fsdp_sim.spec import Cluster

SPACE = {"shard_size": (None, 8, 16), "reshard_after_forward": (True, False), "requires_all_reduce": (True, "last")}
CLUSTER = Cluster("A100-SXM-40GB", gpus=64, bandwidth_gbps=25)
FIXED = {
    "micro_batch": 1, "grad_accum": 4, "seq_len": 2048, "param_dtype": "bf16", "activation_checkpointing": "full"
}  # fmt: skip


def plan_for_a_slow_network():
    return {"shard_size": 8, "reshard_after_forward": False, "requires_all_reduce": "last"}


def plan(shard_size, reshard_after_forward, requires_all_reduce):
    """An answer with these values."""
    values = (shard_size, reshard_after_forward, requires_all_reduce)
    return lambda: dict(zip(SPACE, values, strict=True))


EXERCISE = Exercise(
    title="Shard over eight nodes with a slow network",
    kind=ExerciseKind.PLAN,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="Train llama3-8b on 8 nodes of 8 A100 with 40 GB, 25 Gbit/s per GPU between nodes: sequences of 2,048 "
    "tokens, 4 micro-batches of one per step, bf16, every block recomputed. Return a dict with shard_size (None: all "
    "64 GPUs, 8, 16), reshard_after_forward (True, False) and requires_all_reduce (True: HSDP reduces over the copies "
    "in every micro-batch; 'last': once) with as many tokens per second as possible. Use fsdp_sim.simulate.",
    targets="A pass: 90% of the tokens per second of the best plan that fits; good 95%; optimal the best.",
    reference=plan_for_a_slow_network,
    why="Over all 64 GPUs every micro-batch gathers and reduces across the slow network. With shards inside a node "
    "only gradients cross, and with 'last' once a step instead of four times. That is most of the gain. What memory "
    "is left then pays for keeping parameters after forward, which saves gathers on the fast links.",
    hints=(
        "What crosses the network between nodes in one micro-batch, with shards over 64 GPUs and over 8?",
        "Gradients of four micro-batches may be added up inside the node before they cross. Which setting does that?",
        "Put the shards into the node (8), reduce over the copies once, then see whether keeping parameters still "
        "fits.",
    ),
    judge=BestPlan(model="llama3-8b", cluster=CLUSTER, space=SPACE, fixed=FIXED, passes=0.9),
    wrong=(
        Wrong(plan(None, True, True), "every micro-batch gathers twice and reduces once across the slow network"),
        Wrong(plan(None, False, "last"), "shards over all GPUs: 'last' is about copies, and there are none"),
        Wrong(plan(8, False, True), "the copies' gradients cross the network four times a step; once is enough"),
        Wrong(plan(16, True, "last"), "16 are two nodes: their gathers still cross the slow network"),
    ),
    shortcuts=(
        Wrong(plan(4, False, "last"), "expected one of None, 8, 16, found 4"),
        Wrong(lambda: {"shard_size": 8}, "a dict with a value for each of"),
    ),
    covers=("coverage 001.53", "pitfall 48"),
)
