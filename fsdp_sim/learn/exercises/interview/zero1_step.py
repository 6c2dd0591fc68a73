"""Write one optimizer step of ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, CollectiveOrder, Inputs, OnRanks

RANKS, NUMBERS, LR, BETA = 4, 60_000, 0.1, 0.9


def zero1_step(weights, gradient, momentum, lr, beta):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = torch.empty_like(momentum)
    dist.reduce_scatter(mine, list(gradient.chunk(ranks)))
    momentum = beta * momentum + mine / ranks
    part = weights.chunk(ranks)[rank] - lr * momentum
    dist.all_gather(list(weights.chunk(ranks)), part)  # into views of the weights
    return {"weights": weights, "momentum": momentum}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    weights, momentum = (torch.randn(NUMBERS, generator=draw) for _ in range(2))
    parts = momentum.chunk(RANKS)
    return [(weights, torch.randn(NUMBERS, generator=draw), parts[rank], LR, BETA) for rank in range(RANKS)]


def stepped(
    inputs: Inputs,
    reduce: Callable[[torch.Tensor], torch.Tensor] = lambda gradients: gradients.mean(0),
    momentum_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda old, g: BETA * old + g,
) -> list[dict[str, Any]]:
    """In one process: momentum SGD on the whole, with other ways to reduce gradients and to keep the momentum."""
    old = torch.cat([momentum for _, _, momentum, _, _ in inputs])
    new = momentum_of(old, reduce(torch.stack([gradient for _, gradient, *_ in inputs])))
    weights = inputs[0][0] - LR * new
    return [{"weights": weights, "momentum": part} for part in new.chunk(RANKS)]


def own_gradients(gradients: torch.Tensor) -> torch.Tensor:
    """Of each part, the gradient of the rank that has it."""
    return torch.cat([gradient.chunk(RANKS)[rank] for rank, gradient in enumerate(gradients)])


def only_its_part(inputs: Inputs) -> list[dict[str, Any]]:
    """Each rank's own part is new; the others are as before."""
    right = stepped(inputs)
    old, new = inputs[0][0].chunk(RANKS), right[0]["weights"].chunk(RANKS)
    return [
        right[rank] | {"weights": torch.cat([(new if place == rank else old)[place] for place in range(RANKS)])}
        for rank in range(RANKS)
    ]


def part_alone(inputs: Inputs) -> list[dict[str, Any]]:
    right = stepped(inputs)
    return [of | {"weights": of["weights"].chunk(RANKS)[rank]} for rank, of in enumerate(right)]


def without_momentum(inputs: Inputs) -> list[dict[str, Any]]:
    plain = stepped(inputs, momentum_of=lambda old, g: g)[0]["weights"]
    return [{"weights": plain, "momentum": momentum} for _, _, momentum, _, _ in inputs]


def least_bytes(trial: Trial) -> float:
    return 2 * (RANKS - 1) / RANKS * NUMBERS * 4


def shared(weights: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    dist.all_gather(list(weights.chunk(RANKS)), part)
    return weights


def reduced(gradient: torch.Tensor) -> torch.Tensor:
    mine = torch.empty(len(gradient) // RANKS)
    dist.reduce_scatter(mine, list(gradient.chunk(RANKS)))
    return mine


def state_of_everyone(weights, gradient, momentum, lr, beta):
    both = torch.stack([momentum, reduced(gradient) / RANKS])
    everyones = [torch.empty_like(both) for _ in range(RANKS)]
    dist.all_gather(everyones, both)
    old, mean = torch.cat(everyones, dim=1)
    momentum = beta * old + mean
    return {"weights": weights - lr * momentum, "momentum": momentum.chunk(RANKS)[dist.get_rank()]}


def unchanged(weights, gradient, momentum, lr, beta):
    shared(weights.clone(), reduced(gradient))
    return {"weights": weights, "momentum": momentum}


EXERCISE = Exercise(
    title="Write one optimizer step of ZeRO-1",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=15,
    contract="Every rank has all `weights` (one flat 1-D tensor, the same everywhere; its length is a multiple of the "
    "number of ranks W), the `gradient` of its own batch for all of them, and the `momentum` of its own part only: "
    "the W-th that chunk(W) gives it. Do one step of SGD with the mean gradient, momentum = beta * momentum + gradient "
    "and weights -= lr * momentum, with one reduce-scatter and one all-gather (dist.reduce_scatter, dist.all_gather). "
    "Return {'weights': all of them after the step, 'momentum': this rank's part}.",
    targets="Optimal: each rank sends 2 (W-1)/W of the weights, as DDP's all-reduce does. A pass: up to 1.2 times "
    "that.",
    reference=zero1_step,
    why="An all-reduce is a reduce-scatter and an all-gather. ZeRO-1 puts the optimizer between the two: a rank needs "
    "the mean gradient of its own part only, has the state of that part only, and then shows the others not gradients "
    "but new weights. So the state is divided by W and not one byte more is sent than with DDP. For Adam that is 8 of "
    "16 bytes per parameter, or 12 with a master copy. It works because the optimizer treats each number alone.",
    hints=(
        "To step its part, which gradient does a rank need? To go on with forward, what do the others need of it?",
        "Two collectives, with the optimizer between them. What comes out of the first, and what goes into the second?",
        "reduce_scatter of list(gradient.chunk(W)) into an empty part; divide by W; momentum and the own chunk of the "
        "weights; all_gather of that chunk into the chunks of the weights, which are views.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=stepped,
        causes=(
            (lambda i: stepped(i, own_gradients), "each part was stepped with the gradient of one rank alone"),
            (
                lambda i: stepped(i, lambda gradients: gradients.sum(0)),
                "the gradient is a sum over the ranks where the mean is asked for",
            ),
            (only_its_part, "only this rank's part of the weights is new: the others' were never gathered"),
            (part_alone, "these are this rank's part of the weights alone; gather the others' and return all"),
            (without_momentum, "the momentum was neither used nor kept"),
            (
                lambda i: stepped(i, momentum_of=lambda old, g: BETA * old + (1 - BETA) * g),
                "the gradient was damped by 1 - beta, which is another optimizer",
            ),
        ),
        checks=(
            CollectiveOrder(
                lambda trial: ["reduce_scatter", "all_gather"],
                "a rank needs the mean gradient of its part alone, and the others its new weights",
            ),
            BytesSent(
                least_bytes,
                proof="a ring sends (W-1)/W of them for each of the two collectives",
                good=1.1,
                passes=1.2,
                cure="gather the new weights and nothing else: the optimizer's state stays where it is",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {"mine / ranks": "gradient.chunk(ranks)[rank]"}, "the gradient of one rank alone", name="nothing reduced"
        ),
        mutant({"mine / ranks": "mine"}, "where the mean is asked for", name="with the sum"),
        mutant(
            {
                "dist.all_gather(list(weights.chunk(ranks)), part)  # into views of the weights": (
                    "weights.chunk(ranks)[rank].copy_(part)"
                )
            },
            "only this rank's part of the weights is new",
            name="nothing gathered",
        ),
        mutant(
            {"momentum = beta * momentum + mine / ranks": "", "lr * momentum": "lr * mine / ranks"},
            "neither used nor kept",
            name="momentum left out",
        ),
        mutant({'"weights": weights': '"weights": part'}, "this rank's part of the weights alone", name="part alone"),
        mutant({"mine / ranks": "(1 - beta) * mine / ranks"}, "damped by 1 - beta", name="damped"),
        mutant(
            {'"momentum": momentum}': '"momentum": momentum.repeat(ranks)}'}, "its shape should be", name="whole state"
        ),
        mutant(
            {
                "dist.reduce_scatter(mine, list(gradient.chunk(ranks)))": (
                    "dist.all_reduce(gradient)\nmine = gradient.chunk(ranks)[rank]"
                )
            },
            "expected reduce_scatter, found all_reduce",
            name="as ddp does",
        ),
        Wrong(state_of_everyone, "the optimizer's state stays where it is"),
    ),
    shortcuts=(
        Wrong(unchanged, "numbers differ"),
        Wrong(
            lambda weights, gradient, momentum, lr, beta: {"weights": weights * 0, "momentum": momentum * 0},
            "numbers differ",
        ),
    ),
    covers=("coverage 003.6", "misconception 14"),
)
