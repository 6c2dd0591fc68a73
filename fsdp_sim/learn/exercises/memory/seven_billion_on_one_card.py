"""56 GB, and it fits one card: true or false?"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.exercises.memory.state_bytes_of_a_rank import MODELS, kept_at_the_step
from fsdp_sim.learn.judges import Claim

PARAMS, CARD_BYTES = 7e9, 80e9


def seven_billion_on_one_card():
    model = nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    kept = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    kept += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    per_parameter = sum(t.nbytes for t in kept) / sum(p.numel() for p in parameters)
    return 7e9 * per_parameter <= 80e9, 7e9 * per_parameter


def simulated_bytes() -> float:
    """What one GPU keeps when the optimizer steps, per parameter, for 7 billion of them."""
    params = next(iter(MODELS))
    return PARAMS * kept_at_the_step(params, 1, "fsdp") / params


def bytes_for(per_parameter: float) -> float:
    return PARAMS * per_parameter


def answers(per_parameter: float, says: bool) -> Callable[[], tuple[bool, float]]:
    return lambda: (says, bytes_for(per_parameter))


EXERCISE = Exercise(
    title="Settle whether seven billion parameters train on one card",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=5,
    minutes=10,
    contract='"7 billion parameters take 56 GB to train with AdamW, so they fit one card of 80 GB." Train a small '
    "fp32 model for one step, measure the bytes kept per parameter (parameters, gradients and both moments), and "
    "multiply by 7e9. Return (True or False, the bytes).",
    reference=seven_billion_on_one_card,
    why="Four numbers of 4 bytes: 16 bytes per parameter, 112 GB, before the first activation. 56 GB is 2 + 2 + 4: "
    "weights, gradients and moments all in bf16 and no fp32 copy of anything, a recipe that loses small updates. "
    "Sources that say 56 (or 280 GB for 70 billion) have dropped the precision that training usually keeps.",
    hints=(
        "Which tensors as large as the model exist after optimizer.step()? In which dtype?",
        "Add up the nbytes of parameters, gradients and moments, divide by the number of parameters.",
        "4 + 4 + 2 x 4 bytes for each; times 7e9; is that at most 80e9?",
    ),
    judge=Claim(
        statement="7 billion parameters take 56 GB to train with AdamW and fit one card of 80 GB",
        measured="bytes of parameters, gradients and moments",
        truth=simulated_bytes,
        holds=lambda n_bytes: n_bytes <= CARD_BYTES,
        ranks=1,
        causes=(
            (bytes_for(8), "8 bytes are bf16 weights, gradients and moments, with no fp32 copy; measure an fp32 model"),
            (bytes_for(4), "those are the parameters alone; gradients and two moments come on top"),
            (bytes_for(12), "one of four is missing: parameters, gradients, exp_avg, exp_avg_sq"),
            (bytes_for(20), "the parameters were counted twice; FSDP and plain AdamW keep no second fp32 copy"),
        ),
        rel=1e-4,
    ),
    wrong=(
        Wrong(answers(8, True), "8 bytes are bf16 weights, gradients and moments"),
        Wrong(answers(4, True), "those are the parameters alone"),
        Wrong(answers(12, False), "one of four is missing"),
        Wrong(answers(20, False), "the parameters were counted twice"),
        Wrong(answers(16, True), "the number is right"),
    ),
    shortcuts=(Wrong(lambda: False, "expected True or False and the number"),),
    covers=("misconception 16", "coverage 004.15", "coverage 004.17", "coverage 001.22"),
)
