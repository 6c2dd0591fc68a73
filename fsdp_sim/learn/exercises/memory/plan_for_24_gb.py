"""Choose a plan for a card of 24 GB."""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges.plans import BestPlan
from fsdp_sim.spec import Cluster

SPACE = {
    "micro_batch": (1, 2, 16),
    "activation_checkpointing": (None, "selective", "full"),
    "reshard_after_forward": (True, False),
    "param_dtype": (None, "bf16"),
}


def plan_for_24_gb():
    return {
        "micro_batch": 16,
        "activation_checkpointing": "full",
        "reshard_after_forward": False,
        "param_dtype": "bf16",
    }


def plan(micro_batch, activation_checkpointing, reshard_after_forward, param_dtype):
    """An answer with these values, in the order of `SPACE`."""
    values = (micro_batch, activation_checkpointing, reshard_after_forward, param_dtype)
    return lambda: dict(zip(SPACE, values, strict=True))


EXERCISE = Exercise(
    title="Fit 1.5 billion parameters on cards of 24 GB",
    kind=ExerciseKind.PLAN,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="Train gpt2-1.5b with sequences of 1,024 tokens on 8 RTX-4090. Return a dict with micro_batch (1, 2, 16), "
    "activation_checkpointing (None, 'selective', 'full'), reshard_after_forward (True, False) and param_dtype "
    "(None, 'bf16') that fits and makes as many tokens per second as possible. Use fsdp_sim.simulate.",
    targets="A pass: 85% of the tokens per second of the best plan that fits; good 95%; optimal the best.",
    reference=plan_for_24_gb,
    why="These cards have no fast link, so a step must do much work for each byte that travels: a large micro-batch. "
    "Its activations only fit when they are computed again in backward, which costs a third more FLOPs and saves more "
    "than that in waiting. What is saved also pays for keeping the parameters after forward: a third less to gather. "
    "bf16 halves what travels and doubles the speed of a matmul.",
    hints=(
        "Model states take 16 bytes a parameter over 8 cards. What fills the rest of 24 GB, and what scales it?",
        "Without a fast link, compute per byte sent is what counts: which settings raise it, and which pay for them?",
        "Take the largest micro-batch; then find the checkpointing with which it fits; then see what is left to spend.",
    ),
    judge=BestPlan(
        model="gpt2-1.5b", cluster=Cluster("RTX-4090", gpus=8), space=SPACE, fixed={"seq_len": 1024}, passes=0.85
    ),
    wrong=(
        Wrong(plan(16, None, False, "bf16"), "activations of 16 sequences are not sharded, and do not fit"),
        Wrong(plan(16, "selective", True, "bf16"), "selective checkpointing still keeps outputs of every other matmul"),
        Wrong(plan(1, "full", True, "bf16"), "the wire is the bottleneck, and one sequence gives it nothing to hide"),
        Wrong(plan(16, "full", False, None), "with None all travels and computes in fp32"),
        Wrong(plan(2, "full", True, "bf16"), "memory to spare: spend it on a larger micro-batch"),
    ),
    shortcuts=(
        Wrong(plan(64, "full", False, "bf16"), "expected one of 1, 2, 16, found 64"),
        Wrong(lambda: {**plan_for_24_gb(), "gpus": 64}, "a dict with a value for each of"),
    ),
    covers=("coverage 000.24", "coverage 002.25", "coverage 000.15"),
)
