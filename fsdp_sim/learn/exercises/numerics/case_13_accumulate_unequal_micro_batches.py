"""Gradient accumulation that is not the same as a large batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS = 4, 20_000
TOKENS = (1, 2, 3, 5, 6, 8, 9, 12)  # in the micro-batches, two for each rank, in an order that is drawn


stub = Edit(
    {
        "of_all = torch.tensor(float(sum(len(tokens) for tokens in micro_batches)))\ndist.all_reduce(of_all)": "",
        "losses.sum() * dist.get_world_size() / of_all": "losses.mean() / len(micro_batches)",
    }
)


def case_13(weight, micro_batches):
    weight.requires_grad_()
    of_all = torch.tensor(float(sum(len(tokens) for tokens in micro_batches)))
    dist.all_reduce(of_all)
    for tokens in micro_batches:
        losses = (weight - tokens).square().sum(1) / 2  # one of each token
        loss = losses.sum() * dist.get_world_size() / of_all
        loss.backward()
    dist.all_reduce(weight.grad)
    return weight.grad / dist.get_world_size()  # the mean over the ranks, which FSDP takes


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(NUMBERS, generator=draw)
    counts = [TOKENS[i] for i in torch.randperm(len(TOKENS), generator=draw)]
    batches = [torch.randn(count, NUMBERS, generator=draw) for count in counts]
    return [(weight, batches[2 * rank : 2 * rank + 2]) for rank in range(RANKS)]


def weighted(inputs: Inputs, weigh: Callable[[int, int], float]) -> list[torch.Tensor]:
    """The sum over all tokens of their gradients, each weighed by the tokens of its micro-batch and of its rank."""
    weight = inputs[0][0]
    total = torch.zeros_like(weight)
    for _, batches in inputs:
        of_rank = sum(map(len, batches))
        for tokens in batches:
            total += (weight - tokens).sum(0) * weigh(len(tokens), of_rank)
    return [total] * RANKS


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return weighted(inputs, lambda of_batch, of_rank: 1 / sum(TOKENS))


EXERCISE = Exercise(
    title="Mend an accumulation that depends on how the batch is cut",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=5,
    minutes=20,
    contract='"Gradient accumulation over K micro-batches gives the same result, if each loss is divided by K." Here '
    "micro-batches have different numbers of tokens (sequences are padded), on 4 ranks with 2 each, and cut in another "
    "way the same batch gives another gradient. Mend the loss: the gradient is to be that of the mean over all tokens "
    "of all micro-batches of all ranks. The last two lines stand for FSDP; leave them.",
    reference=case_13,
    stub=stub,
    why="Dividing by K is right only when all micro-batches have as many tokens. A mean of means lets a token of a "
    "short one count for more. So: the sum of the losses, over the tokens of everybody, which takes one all-reduce of "
    "one number before the first backward; times the ranks, since FSDP will divide by them.",
    cause="micro-batches of unequal length are averaged as if they were equal",
    hints=(
        "Two micro-batches, of 1 token and of 3. How much does each token count in the mean of the two means?",
        "Sums may be added up over micro-batches and ranks, means may not. And FSDP divides by the ranks in the end.",
        "all_reduce the number of this rank's tokens first; then each loss is losses.sum() * ranks / of_all.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                lambda inputs: weighted(inputs, lambda of_batch, of_rank: 1 / (2 * RANKS * of_batch)),
                "it is the mean of the micro-batches' means: a token counts more in a short one",
            ),
            (
                lambda inputs: weighted(inputs, lambda of_batch, of_rank: 1 / (RANKS * of_rank)),
                "it is the mean of the ranks' means: a token counts more on a rank that has few",
            ),
            (
                lambda inputs: weighted(inputs, lambda of_batch, of_rank: 1 / of_batch / RANKS),
                "the micro-batches' means are added up and not divided",
            ),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "all-reduces are all it takes"),),
        abs_=1e-4,
    ),
    wrong=(
        Wrong(stub, "it is the mean of the micro-batches' means"),
        mutant(
            {"losses.sum() * dist.get_world_size() / of_all": "losses.sum() / sum(map(len, micro_batches))"},
            "it is the mean of the ranks' means",
        ),
        mutant({"losses.sum() * dist.get_world_size() / of_all": "losses.sum() / of_all"}, "divided once too often"),
        mutant({"losses.sum() * dist.get_world_size() / of_all": "losses.mean()"}, "added up and not divided"),
    ),
    shortcuts=(
        Wrong(lambda weight, micro_batches: torch.zeros_like(weight), "all of it is zero"),
        Wrong(lambda weight, micro_batches: weight - torch.cat(micro_batches).mean(0), "numbers differ"),
    ),
    covers=("misconception 36", "pitfall 31", "coverage 004.70"),
    stub_says="it is the mean of the micro-batches' means",
)
