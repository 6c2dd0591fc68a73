"""Rows of 4,096 tokens on cards of 40 GB: which settings pay for which?"""

from __future__ import annotations

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges.plans import BestPlan
from fsdp_sim.spec import Cluster

SPACE = {
    "micro_batch": (1, 2),
    "activation_checkpointing": (None, "selective", "full"),
    "reshard_after_forward": (True, 4, False),
    "cpu_offload": (False, True),
}


def plan_for_long_rows():
    return {
        "micro_batch": 2,
        "activation_checkpointing": "selective",
        "reshard_after_forward": True,
        "cpu_offload": False,
    }


def plan(micro_batch, activation_checkpointing, reshard_after_forward, cpu_offload):
    """An answer with these values, in the order of `SPACE`."""
    values = (micro_batch, activation_checkpointing, reshard_after_forward, cpu_offload)
    return lambda: dict(zip(SPACE, values, strict=True))


EXERCISE = Exercise(
    title="Fit long rows on cards of 40 GB",
    kind=ExerciseKind.PLAN,
    difficulty=3,
    importance=4,
    minutes=15,
    contract="Train llama2-7b in bf16 with rows of 4,096 tokens on 8 A100-SXM-40GB. Return a dict with micro_batch (1, "
    "2), activation_checkpointing (None, 'selective', 'full'), reshard_after_forward (True, 4, False) and cpu_offload "
    "(False, True) that fits and makes as many tokens per second as possible. Use fsdp_sim.simulate.",
    targets="A pass: 85% of the tokens per second of the best plan that fits; good 95%; optimal the best.",
    reference=plan_for_long_rows,
    why="Pay with what costs least time. Resharding costs gathers that hide behind compute: take it. One row's "
    "activations fit as they are. A second row uses the matmuls better and shares the step's fixed costs; selective "
    "checkpointing makes room for it and computes two fifths of the linear layers again, for a gain of a percent. Full "
    "checkpointing costs a forward, which nothing here pays for. Offload sends states over PCIe and steps on the CPU: "
    "nearly half of the speed, for memory that is not needed.",
    hints=(
        "States take 16 bytes per parameter over 8 cards. What is left of 40 GB, and what do one row's activations "
        "take?",
        "Each setting buys memory with time. Which is the cheapest per GiB? Simulate each alone.",
        "Begin with torch's defaults and one row. Does it fit? Then: is a second worth what makes room for it?",
    ),
    judge=BestPlan(
        model="llama2-7b",
        cluster=Cluster("A100-SXM-40GB", gpus=8),
        space=SPACE,
        fixed={"seq_len": 4096, "param_dtype": "bf16"},
        passes=0.85,
    ),
    wrong=(
        Wrong(plan(2, None, True, False), "two rows' activations do not fit, and no number of ranks divides them"),
        Wrong(plan(1, None, False, False), "without resharding the whole model stands at the end of forward"),
        Wrong(plan(1, None, True, True), "offload is for states that do not fit otherwise; here it waits for PCIe"),
        Wrong(plan(1, "full", True, False), "memory to spare: every block is computed again for nothing"),
    ),
    shortcuts=(
        Wrong(plan(4, None, True, False), "expected one of 1, 2, found 4"),
        Wrong(lambda: {"micro_batch": 1}, "a dict with a value for each of"),
    ),
    covers=("coverage 000.17", "coverage 002.2", "coverage 001.54"),
)
