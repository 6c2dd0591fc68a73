"""Write a unit's step in mixed precision: what is cast, what travels, what stays."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, CollectiveOrder, Inputs, OnRanks

RANKS, ROWS, COLUMNS, LR = 2, 128, 1_000, 0.5  # of two numbers the sum rounds alike in any order


def cast_gather_reduce(shard, backward, lr):
    ranks = dist.get_world_size()
    weight = torch.empty(ranks * len(shard), shard.shape[1], dtype=torch.bfloat16)
    dist.all_gather_single(weight, shard.bfloat16())
    gradient = backward(weight).float()
    own = torch.empty_like(shard)
    dist.reduce_scatter_single(own, gradient)
    return shard - lr * own / ranks


def backward_on(x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """This rank's gradient of a whole weight, computed in the weight's dtype."""

    def backward(weight: torch.Tensor) -> torch.Tensor:
        return weight * x.to(weight.dtype)

    return backward


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(ROWS, COLUMNS, generator=draw),
            backward_on(torch.randn(RANKS * ROWS, COLUMNS, generator=draw)),
            LR,
        )
        for _ in range(RANKS)
    ]


def stepped(
    inputs: Inputs,
    *,
    compute: torch.dtype = torch.bfloat16,
    reduce: torch.dtype = torch.float32,
    keep: torch.dtype = torch.float32,
    divide: int = RANKS,
) -> list[torch.Tensor]:
    """The step in one process, with these dtypes."""
    weight = torch.cat([shard for shard, _, _ in inputs]).to(compute)
    total = sum(backward(weight).to(reduce) for _, backward, _ in inputs)
    parts = (torch.as_tensor(total).float() / divide).chunk(RANKS)
    return [(shard.to(keep) - (LR * part).to(keep)).float() for (shard, _, _), part in zip(inputs, parts, strict=True)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return stepped(inputs)


def least_bytes(trial: Trial) -> float:
    return (RANKS - 1) / RANKS * RANKS * ROWS * COLUMNS * (2 + 4)


def gathered(dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    def of(shard: torch.Tensor) -> torch.Tensor:
        weight = torch.empty(RANKS * len(shard), shard.shape[1], dtype=dtype)
        dist.all_gather_single(weight, shard.to(dtype))
        return weight

    return of


def reduced(gradient: torch.Tensor) -> torch.Tensor:
    own = torch.empty(len(gradient) // RANKS, gradient.shape[1], dtype=gradient.dtype)
    dist.reduce_scatter_single(own, gradient)
    return own.float() / RANKS


def reduced_in_bf16(shard, backward, lr):
    return shard - lr * reduced(backward(gathered(torch.bfloat16)(shard)))


EXERCISE = Exercise(
    title="Write a unit's step in mixed precision",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=25,
    contract="A unit with param_dtype=bf16 and reduce_dtype=fp32, on 2 ranks. shard is this rank's rows of a weight, "
    "in fp32. Gather the weight in bf16, call backward(weight), which returns this rank's gradient in the dtype of the "
    "weight, reduce-scatter it in fp32, and return the shard after one SGD step with the mean gradient and rate lr.",
    targets="Optimal: 2 bytes travel for each number gathered and 4 for each reduced, and nothing else.",
    reference=cast_gather_reduce,
    why="param_dtype is the dtype of what is gathered and computed with, not of what is stored: the shard stays fp32 "
    "and takes the step, so a small update is not rounded away. Cast before gathering, and half the bytes travel. "
    "Gradients come in bf16 and are cast up before they are added: each addition in bf16 would round again.",
    hints=(
        "Three dtypes: of what is kept, of what is gathered and computed with, of what is added up. Which is which?",
        "Cast this rank's shard, then gather into a bf16 tensor; cast the gradient up, then reduce-scatter.",
        "all_gather_single(weight_bf16, shard.bfloat16()); reduce_scatter_single(own_fp32, backward(...).float()).",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (lambda i: stepped(i, compute=torch.float32), "the weight was gathered and computed with in fp32"),
            (lambda i: stepped(i, reduce=torch.bfloat16), "the gradients were added up in bf16, which rounds the sum"),
            (lambda i: stepped(i, keep=torch.bfloat16), "the shard was stepped in bf16: what is kept stays fp32"),
            (lambda i: stepped(i, divide=1), "the gradients are summed over the ranks where their mean is asked for"),
        ),
        checks=(
            CollectiveOrder(lambda trial: ["all_gather", "reduce_scatter"], "one gather, one reduction"),
            BytesSent(
                least_bytes,
                proof="2 bytes for each number gathered, 4 for each reduced",
                good=1.05,
                passes=1.2,
                cure="cast the shard before you gather it",
            ),
        ),
    ),
    wrong=(
        mutant(
            {", dtype=torch.bfloat16": "", "shard.bfloat16()": "shard"},
            "the weight was gathered and computed with in fp32",
            name="all in fp32",
        ),
        mutant(
            {
                ", dtype=torch.bfloat16": "",
                "shard.bfloat16()": "shard",
                "backward(weight)": "backward(weight.bfloat16())",
            },
            "cast the shard before you gather it",
            name="cast too late",
        ),
        Wrong(reduced_in_bf16, "the gradients were added up in bf16"),
        mutant(
            {"shard - lr * own / ranks": "(shard.bfloat16() - (lr * own / ranks).bfloat16()).float()"},
            "the shard was stepped in bf16",
            name="kept in bf16",
        ),
        mutant({"own / ranks": "own"}, "summed over the ranks where their mean", name="not divided"),
    ),
    shortcuts=(
        Wrong(lambda shard, backward, lr: shard, "numbers differ"),
        Wrong(lambda shard, backward, lr: shard * 0, "all of it is zero"),
    ),
    covers=("coverage 002.4", "coverage 002.5", "coverage 002.8", "coverage 003.17", "pitfall 33"),
)
