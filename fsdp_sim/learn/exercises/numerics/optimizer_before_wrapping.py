"""An optimizer that is made before wrapping never trains: true or false?"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, WIDTH, LR = 2, 16, 0.5
WAYS = ("FSDP2", "FSDP1", "FSDP1, use_orig_params")


def optimizer_before_wrapping(weight, x, lr):
    def loss_after_a_step(wrap):
        model = nn.Linear(len(weight), len(weight), bias=False)
        model.weight.data = weight.clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        model = wrap(model)
        model(x).square().mean().backward()
        optimizer.step()
        return model(x).square().mean().item()

    fsdp1 = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    return {
        "FSDP2": loss_after_a_step(fully_shard),
        "FSDP1": loss_after_a_step(fsdp1),
        "FSDP1, use_orig_params": loss_after_a_step(partial(fsdp1, use_orig_params=True)),
    }


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5
    return [(weight, torch.randn(8, WIDTH, generator=draw), LR) for _ in range(RANKS)]


def losses(inputs: Inputs, trained: bool) -> list[float]:
    """Each rank's loss at the start or after one step, in one process."""
    weight = inputs[0][0].clone().requires_grad_()
    mean = torch.stack([(x @ weight.T).square().mean() for _, x, _ in inputs]).mean()
    (gradient,) = torch.autograd.grad(mean, weight)
    after = weight.detach() - (LR * gradient if trained else 0)
    return [(x @ after.T).square().mean().item() for _, x, _ in inputs]


def by_way(inputs: Inputs, trains: tuple[bool, bool, bool]) -> list[dict[str, float]]:
    of_way = [losses(inputs, does) for does in trains]
    return [{way: of[rank] for way, of in zip(WAYS, of_way, strict=True)} for rank in range(RANKS)]


def never_steps(weight, x, lr):
    return dict.fromkeys(WAYS, (x @ weight.T).square().mean().item())


def alone(weight, x, lr):
    weight = weight.clone().requires_grad_()
    (x @ weight.T).square().mean().backward()
    before = (x @ weight.T).square().mean().item()
    after = (x @ (weight - lr * weight.grad).T).square().mean().item()
    return {"FSDP2": before, "FSDP1": before, "FSDP1, use_orig_params": after}


EXERCISE = Exercise(
    title="Settle whether the optimizer must come after wrapping",
    kind=ExerciseKind.CLAIM,
    difficulty=3,
    importance=4,
    minutes=20,
    contract='"An optimizer that is made before the model is wrapped never trains it." Settle it on 2 ranks: make an '
    "nn.Linear without bias with the given weight, an SGD of rate lr, and only then wrap: with fully_shard, with "
    "FullyShardedDataParallel(device_id=torch.device('cpu')), and with use_orig_params=True too. Do one step on "
    "model(x).square().mean() and return this loss after it by way: {'FSDP2': ..., 'FSDP1': ..., "
    "'FSDP1, use_orig_params': ...}.",
    reference=optimizer_before_wrapping,
    why="For FSDP2 and for FSDP1 as it comes it is true: wrapping puts other parameters on the module, the optimizer "
    "holds the old ones, whose gradient stays None, and steps nothing without a word: the loss is constant from "
    "step 0. With use_orig_params=True FSDP1 keeps the parameter objects and changes what is behind them, so it "
    "trains. Making it after wrapping is right for all three: do that.",
    hints=(
        "An optimizer holds parameter objects. Are those on the module after wrapping the same ones?",
        "One step, then the loss again: it is what it was, or smaller. Do it for each of the three ways.",
        "A function of wrap: Linear, its weight, SGD, model = wrap(model), backward, step, and the loss once more.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=lambda inputs: by_way(inputs, (False, False, True)),
        causes=(
            (
                lambda inputs: by_way(inputs, (True, True, True)),
                "all three have trained: make the optimizer before you wrap",
            ),
            (
                lambda inputs: by_way(inputs, (False, False, False)),
                "none has trained: one of the three keeps the parameter objects that the optimizer holds",
            ),
            (
                lambda inputs: by_way(inputs, (True, False, True)),
                "fully_shard replaces the module's parameters, so FSDP2 has not trained",
            ),
        ),
        rel=1e-4,
    ),
    wrong=(
        mutant(
            {
                "optimizer = torch.optim.SGD(model.parameters(), lr=lr)\nmodel = wrap(model)": (
                    "model = wrap(model)\noptimizer = torch.optim.SGD(model.parameters(), lr=lr)"
                )
            },
            "all three have trained",
            name="after wrapping",
        ),
        Wrong(never_steps, "none has trained"),
        mutant(
            {"loss_after_a_step(fully_shard)": "loss_after_a_step(partial(fsdp1, use_orig_params=True))"},
            "FSDP2 has not trained",
            name="only fsdp1",
        ),
    ),
    shortcuts=(
        Wrong(alone, "FSDP1, use_orig_params: expected"),
        Wrong(lambda weight, x, lr: {"FSDP2": 1.0, "FSDP1": 1.0, "FSDP1, use_orig_params": 0.5}, "expected"),
    ),
    covers=("misconception 25", "pitfall 11", "coverage 001.5", "coverage 004.73", "coverage 004.97"),
)
