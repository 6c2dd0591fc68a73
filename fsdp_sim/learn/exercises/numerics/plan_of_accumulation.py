"""Choose how to accumulate gradients on cards of 24 GB."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges.plans import BestPlan
from fsdp_sim.spec import Cluster

SPACE = {
    "micro_batch": (2, 4, 8),
    "activation_checkpointing": (None, "full"),
    "requires_gradient_sync": (True, "last"),
}
FIXED = {
    "seq_len": 512,
    "grad_accum": 8,
    "param_dtype": "bf16",
    "reduce_dtype": "fp32",
    "reshard_after_forward": False,
}


def plan_of_accumulation():
    return {
        "micro_batch": 8,
        "activation_checkpointing": "full",
        "requires_gradient_sync": "last",
    }


def plan(micro_batch, activation_checkpointing, requires_gradient_sync):
    """An answer with these values, in the order of `SPACE`."""
    values = (micro_batch, activation_checkpointing, requires_gradient_sync)
    return lambda: dict(zip(SPACE, values, strict=True))


EXERCISE = Exercise(
    title="Choose when to reduce the gradients of eight micro-batches",
    kind=ExerciseKind.PLAN,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="gpt2-1.5b on 4 RTX-4090 (24 GB) joined by PCIe3, 8 micro-batches a step of sequences of 512 tokens, bf16 "
    "with gradients reduced in fp32; reshard_after_forward=False. Return a dict with micro_batch (2, 4, 8), "
    "activation_checkpointing (None, 'full') and requires_gradient_sync (True reduces in each micro-batch, 'last' in "
    "the last one only) that fits and makes as many tokens per second as possible. Use fsdp_sim.simulate.",
    targets="A pass: 92% of the tokens per second of the best plan that fits; good 95%; optimal the best.",
    reference=plan_of_accumulation,
    why="'last' sends an eighth of the gradients and keeps all of them, whole and in fp32, on every GPU: 4 bytes for "
    "each of 1.5 billion parameters, however many GPUs there are. On cards without a fast link that trade is good, so "
    "make room for it: checkpointing costs a third more compute and frees more memory than the gradients take. With a "
    "fast link or a larger model it would be the other way round: reduce every time.",
    hints=(
        "What does 'last' save in bytes sent, and what does it keep that True does not?",
        "Whole gradients take 4 bytes a parameter here, not divided by the GPUs. What can make room for 6 GB?",
        "Take 'last'; then find out with which checkpointing the largest micro-batch fits.",
    ),
    judge=BestPlan(
        model="gpt2-1.5b", cluster=Cluster("RTX-4090", gpus=4, intra="PCIe3"), space=SPACE, fixed=FIXED, passes=0.92
    ),
    wrong=(
        Wrong(plan(4, None, "last"), "checkpoint, and eight sequences fit beside the whole gradients"),
        Wrong(plan(4, None, True), "every micro-batch sends all its gradients over a slow link"),
        Wrong(plan(8, "full", True), "there is room for whole gradients; reduce them once"),
        Wrong(plan(8, None, "last"), "activations of 8 sequences are not sharded, and do not fit"),
        Wrong(plan(2, "full", "last"), "two sequences give the wire too little to hide behind"),
    ),
    shortcuts=(
        Wrong(plan(16, "full", "last"), "expected one of 2, 4, 8, found 16"),
        Wrong(lambda: {**plan_of_accumulation(), "grad_accum": 64}, "a dict with a value for each of"),
    ),
    covers=("pitfall 29", "pitfall 28", "coverage 001.10", "coverage 004.8"),
)
