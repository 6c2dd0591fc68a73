"""56 GB, and it fits one card: true or false?"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.memory.state_bytes_of_a_rank import MODELS, kept_at_the_step
from fsdp_sim.learn.judges import Claim

PARAMS, CARD_BYTES = 7e9, 80e9
PLAIN, DTYPES = ("exp_avg", "exp_avg_sq"), ("float32", "bfloat16", "float8_e5m2")


class OtherAdamW(torch.optim.AdamW):
    """AdamW that keeps its moments in other dtypes, and some more of them."""

    def __init__(self, params: Any, moments: dict[str, str], **settings: Any) -> None:
        super().__init__(params, **settings)
        self._moments = {name: getattr(torch, dtype) for name, dtype in moments.items()}

    def step(self, closure: Any = None) -> Any:
        for state in self.state.values():
            state.update({name: state[name].float() for name in PLAIN})
        loss = super().step(closure)
        for state in self.state.values():
            state |= {name: state.get(name, state["exp_avg"]).to(dtype) for name, dtype in self._moments.items()}
        return loss


def seven_billion_on_one_card(optimizer=torch.optim.AdamW):
    model = nn.Linear(256, 256)
    adamw = optimizer(model.parameters())
    model(torch.randn(4, 256)).sum().backward()
    adamw.step()
    parameters = list(model.parameters())
    kept = [*parameters, *(p.grad for p in parameters if p.grad is not None)]
    kept += [moment for p in parameters for moment in adamw.state[p].values() if moment.shape == p.shape]
    per_parameter = sum(t.nbytes for t in kept) / sum(p.numel() for p in parameters)
    return 7e9 * per_parameter <= 80e9, 7e9 * per_parameter


def other(draw: random.Random) -> tuple[Any, ...]:
    """An AdamW with moments unlike torch's, so that another number is right."""
    names = [*PLAIN, *(f"exp_avg_{n}" for n in range(3, 3 + draw.randint(0, 2)))]
    moments = {name: draw.choice(DTYPES) for name in names}
    plain = sum(getattr(torch, dtype).itemsize for dtype in moments.values()) == 8
    return other(draw) if plain else (functools.partial(OtherAdamW, moments=moments),)


def true_bytes(*optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """What one GPU keeps when torch's AdamW steps, simulated for 7 billion parameters; or another, measured here."""
    if optimizer:
        return seven_billion_on_one_card(*optimizer)[1]
    params = next(iter(MODELS))
    return PARAMS * kept_at_the_step(params, 1, "fsdp") / params


def bytes_for(per_parameter: float) -> float:
    return PARAMS * per_parameter


def and_the_step(n_bytes: float) -> bool:
    """Whether they are four numbers and a little more: the steps of a small model's AdamW."""
    return bytes_for(16) < n_bytes < bytes_for(17)


def answers(per_parameter: float, says: bool) -> Callable[..., tuple[bool, float]]:
    return lambda *optimizer: (says, bytes_for(per_parameter))


EXERCISE = Exercise(
    title="Settle whether seven billion parameters train on one card",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=5,
    minutes=10,
    contract='"7 billion parameters take 56 GB to train with AdamW, so they fit one card of 80 GB." Train a small '
    "fp32 model for one step, measure the bytes kept per parameter (parameters, gradients and both moments), and "
    "multiply by 7e9. Return (True or False, the bytes). It is called once more with an AdamW whose moments are drawn "
    "anew, in dtypes and number, so measure what that one keeps.",
    reference=seven_billion_on_one_card,
    why="Four numbers of 4 bytes: 16 bytes per parameter, 112 GB, before the first activation. 56 GB is 2 + 2 + 4: "
    "weights, gradients and moments all in bf16 and no fp32 copy of anything, a recipe that loses small updates. "
    "Sources that say 56 (or 280 GB for 70 billion) have dropped the precision that training usually keeps.",
    hints=(
        "Which tensors as large as the model exist after optimizer.step()? In which dtype?",
        "Add up the nbytes of parameters, gradients and all moments in optimizer.state[p], divide by the number of "
        "parameters.",
        "4 + 4 + 2 x 4 bytes for each; times 7e9; is that at most 80e9?",
    ),
    judge=Claim(
        statement="7 billion parameters take 56 GB to train with AdamW and fit one card of 80 GB",
        measured="bytes of parameters, gradients and moments",
        truth=true_bytes,
        drawn=other,
        instead="an AdamW of other moments",
        holds=lambda n_bytes: n_bytes <= CARD_BYTES,
        ranks=1,
        causes=(
            (bytes_for(8), "8 bytes are bf16 weights, gradients and moments, with no fp32 copy; measure an fp32 model"),
            (bytes_for(4), "those are the parameters alone; gradients and two moments come on top"),
            (bytes_for(12), "one of four is missing: parameters, gradients, exp_avg, exp_avg_sq"),
            (bytes_for(20), "the parameters were counted twice; FSDP and plain AdamW keep no second fp32 copy"),
            (and_the_step, "AdamW's step is no moment; count the tensors that have the shape of the parameter"),
        ),
        rel=1e-4,
    ),
    wrong=(
        Wrong(answers(8, True), "8 bytes are bf16 weights, gradients and moments"),
        Wrong(answers(4, True), "those are the parameters alone"),
        Wrong(answers(12, False), "one of four is missing"),
        Wrong(answers(20, False), "the parameters were counted twice"),
        Wrong(answers(16, True), "the number is right"),
        mutant(
            {"if moment.shape == p.shape": "", "nn.Linear(256, 256)": "nn.Linear(8, 8)", "(4, 256)": "(4, 8)"},
            "AdamW's step is no moment",
            name="counts the step",
        ),
    ),
    shortcuts=(
        Wrong(lambda *optimizer: False, "expected True or False and the number"),
        Wrong(answers(16, False), "not everything was measured: run once more with an AdamW of other moments"),
        Wrong(
            lambda *optimizer: seven_billion_on_one_card(),
            "not everything was measured: run once more with an AdamW of other moments",
        ),
    ),
    covers=("misconception 16", "coverage 004.15", "coverage 004.17", "coverage 001.22"),
)
