"""A guide's "optimized" configuration, tuned."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges.plans import BestPlan
from fsdp_sim.spec import Cluster

MODEL, CLUSTER = "llama2-7b", Cluster("A100-SXM-40GB", gpus=8)
FIXED = {"seq_len": 2048, "reduce_dtype": "fp32"}
SPACE = {
    "micro_batch": (1, 2, 4),
    "param_dtype": (None, "bf16"),
    "activation_checkpointing": (None, "full"),
    "reshard_after_forward": (None, False),
    "cpu_offload": (True, False),
}


def plan_without_offload():
    return {
        "micro_batch": 2,
        "param_dtype": "bf16",
        "activation_checkpointing": None,
        "reshard_after_forward": None,
        "cpu_offload": False,
    }


def plan(micro_batch, param_dtype, activation_checkpointing, reshard_after_forward, cpu_offload):
    """An answer with these values, in the order of `SPACE`."""
    values = (micro_batch, param_dtype, activation_checkpointing, reshard_after_forward, cpu_offload)
    return lambda: dict(zip(SPACE, values, strict=True))


EXERCISE = Exercise(
    title="Tune a plan that offloads to the CPU",
    kind=ExerciseKind.PLAN,
    difficulty=3,
    importance=4,
    minutes=15,
    contract="llama2-7b on 8 A100-SXM-40GB, sequences of 2,048 tokens, gradients reduced in fp32. A guide offloads to "
    "the CPU to make it fit. Do better: return a dict with micro_batch (1, 2, 4), param_dtype (None, 'bf16'), "
    "activation_checkpointing (None, 'full'), reshard_after_forward (None, False) and cpu_offload (True, False) that "
    "fits. Use fsdp_sim.simulate.",
    targets="A pass: 90% of the tokens per second of the best plan that fits; good 95%; optimal the best.",
    reference=plan_without_offload,
    why="Sharded over 8 ranks, 16 bytes per parameter are 12.5 GiB: they fit without offload, and what fills the card "
    "is activations, which offload does not touch. Offloading sends every shard over PCIe twice and every gradient "
    "once, and steps AdamW on the CPU. So offload is the last knob, after the micro-batch and checkpointing; and "
    "checkpointing pays only where it buys a micro-batch that is worth the second forward.",
    hints=(
        "What does offload take from the GPU, how many GiB is that here, and what else fills the card?",
        "States are 16 bytes x 6.7 billion / 8. Turn offload off first; then see which micro-batch fits, with and "
        "without checkpointing.",
        "bf16, nothing offloaded, units freed after forward, nothing recomputed: which is the largest micro-batch?",
    ),
    judge=BestPlan(model=MODEL, cluster=CLUSTER, space=SPACE, fixed=FIXED, passes=0.9),
    wrong=(
        Wrong(plan(2, "bf16", None, None, True), "offload saves states, which fit; it costs the step over PCIe"),
        Wrong(plan(4, "bf16", None, None, True), "activations fill the card, and offload does not take those away"),
        Wrong(plan(4, "bf16", "full", None, True), "recomputing and offload pay twice for memory that was there"),
        Wrong(plan(2, "bf16", None, False, False), "whole parameters kept from forward to backward do not fit beside"),
        Wrong(plan(1, "bf16", "full", None, False), "it recomputes what would have fit"),
        Wrong(plan(1, None, "full", None, False), "with None all is computed and gathered in fp32"),
    ),
    shortcuts=(
        Wrong(plan(8, "bf16", None, None, False), "expected one of 1, 2, 4, found 8"),
        Wrong(lambda: {"cpu_offload": False}, "a dict with a value for each of"),
    ),
    covers=(
        "coverage 002.34",
        "coverage 002.2",
        "coverage 004.78",
        "misconception 2.1",
        "misconception 2.32",
        "misconception 2.34",
        "misconception 4.93",
    ),
)
