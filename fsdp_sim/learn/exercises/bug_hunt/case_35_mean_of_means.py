"""Losses that depend on how the sequences fall on the ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS = 4, 60_000


def stub(gradient_of_each_token):
    gradient = gradient_of_each_token.mean(0)
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def case_35(gradient_of_each_token):
    tokens = torch.tensor(float(len(gradient_of_each_token)))
    gradient = gradient_of_each_token.sum(0)
    dist.all_reduce(gradient)
    dist.all_reduce(tokens)
    return gradient / tokens


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    tokens = (torch.randperm(6, generator=draw)[:RANKS] + 1).tolist()
    return [(torch.randn(n, NUMBERS, generator=draw),) for n in tokens]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.cat([rows for (rows,) in inputs]).mean(0)] * RANKS


def means_averaged(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.stack([rows.mean(0) for (rows,) in inputs]).mean(0)] * RANKS


def summed(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.cat([rows for (rows,) in inputs]).sum(0)] * RANKS


def by_own_tokens(inputs: Inputs) -> list[torch.Tensor]:
    return [summed(inputs)[0] / (RANKS * len(rows)) for (rows,) in inputs]


def gathers_everything(gradient_of_each_token):
    rows: list = [None] * dist.get_world_size()
    dist.all_gather_object(rows, gradient_of_each_token)
    return torch.cat(rows).mean(0)


EXERCISE = Exercise(
    title="Mend a mean that depends on the ranks",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="Ranks have sequences of different lengths: each is given one row per token, the gradient of that token's "
    "loss. The gradient of the batch is the mean over all tokens of all ranks. Sort the same batch onto the ranks in "
    "another way, and this code gives another gradient. Mend it, with all-reduces.",
    reference=case_35,
    stub=stub,
    why="A mean of means weighs a token by how many tokens its rank has: on a rank with few, each counts more. Sum the "
    "gradients, sum the tokens, and divide once. FSDP divides by the ranks for you, so there the loss to call backward "
    "on is the sum over this rank's tokens, times the ranks, over all tokens.",
    cause="each rank takes the mean of its own tokens, and the means are averaged",
    hints=(
        "Two ranks, one with 1 token and one with 3. What does each token weigh in the result? What should it?",
        "A mean is a sum over a count, and sums may be added up over the ranks; means may not.",
        "all_reduce the sum of the rows and the number of rows, then divide one by the other.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (means_averaged, "it is the mean of the ranks' means: a token counts more on a rank that has few"),
            (summed, "it is the sum over all tokens; divide by their number"),
            (by_own_tokens, "it is divided by this rank's tokens, and the ranks have different numbers of them"),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "the tokens' gradients stay where they are"),),
    ),
    wrong=(
        Wrong(stub, "it is the mean of the ranks' means"),
        mutant({"gradient / tokens": "gradient"}, "it is the sum over all tokens", name="only summed"),
        mutant(
            {"dist.all_reduce(tokens)": "", "gradient / tokens": "gradient / (tokens * dist.get_world_size())"},
            "it is divided by this rank's tokens",
            name="divided by own",
        ),
        Wrong(gathers_everything, "expected only all_reduce, found all_gather"),
    ),
    shortcuts=(
        Wrong(lambda gradient_of_each_token: gradient_of_each_token.mean(0), "expected"),
        Wrong(lambda gradient_of_each_token: torch.zeros(NUMBERS), "all of it is zero"),
    ),
    covers=("pitfall 31", "misconception 36"),
    stub_says="it is the mean of the ranks' means",
)
