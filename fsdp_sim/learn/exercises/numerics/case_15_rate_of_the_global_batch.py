"""A learning rate that is multiplied by the number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS, BASE_LR, BASE_ROWS = 4, 20_000, 0.4, 8


stub = Edit(
    {
        "of_all = torch.tensor(float(len(rows)))\ndist.all_reduce(of_all)": "",
        "base_lr * of_all.item() / base_rows": "base_lr * dist.get_world_size()",
    }
)


def case_15(weight, rows, base_lr, base_rows):
    of_all = torch.tensor(float(len(rows)))
    dist.all_reduce(of_all)
    lr = base_lr * of_all.item() / base_rows
    gradient = (weight - rows).mean(0)
    dist.all_reduce(gradient)
    return weight - lr * gradient / dist.get_world_size()


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    weight, rows = torch.randn(NUMBERS, generator=draw), (1, 3)[int(torch.randint(2, (1,), generator=draw))]
    return [(weight, torch.randn(rows, NUMBERS, generator=draw), BASE_LR, BASE_ROWS) for _ in range(RANKS)]


def stepped(rate: Callable[[int], float]) -> Callable[[Inputs], list[torch.Tensor]]:
    """The step in one process on all rows; the rate follows from the rows of one rank."""

    def step(inputs: Inputs) -> list[torch.Tensor]:
        weight, own = inputs[0][:2]
        mean = (weight - torch.cat([rows for _, rows, *_ in inputs])).mean(0)
        return [weight - rate(len(own)) * mean] * RANKS

    return step


def right(own: int) -> float:
    return BASE_LR * RANKS * own / BASE_ROWS


def by_ranks(own: int) -> float:
    return BASE_LR * RANKS


def as_it_was(own: int) -> float:
    return BASE_LR


def by_own_rows(own: int) -> float:
    return BASE_LR * own / BASE_ROWS


def by_root(own: int) -> float:
    return BASE_LR * (RANKS * own / BASE_ROWS) ** 0.5


EXERCISE = Exercise(
    title="Mend a learning rate that grows with the ranks",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=15,
    contract='"Going from 1 to N GPUs, multiply the learning rate by N." A recipe has a rate base_lr for steps of '
    "base_rows rows, and scales it in proportion to the rows of a step (the linear rule for SGD). Symptom: on 4 ranks "
    "it diverges, although a step has about as many rows as before, now spread over the ranks. Mend the rate. Each "
    "rank has as many rows as every other; return the new weight.",
    reference=case_15,
    stub=stub,
    why="Ranks do not make a gradient larger: it is averaged. Spread the same rows over more ranks, and the gradient, "
    "hence the best rate, is the same. What may change the rate is the global batch: rows of a rank times ranks times "
    "micro-batches. By how much is a rule of thumb (in proportion for SGD, its root for Adam, up to a point), to be "
    "tried, not trusted.",
    cause="the learning rate is multiplied by the ranks, though the rows of a step stay as many",
    hints=(
        "One rank with 8 rows, or four with 2 each: how do the averaged gradients differ?",
        "The rule speaks of the rows of a whole step. How many are that, over all ranks?",
        "all_reduce the number of this rank's rows; the rate is base_lr times that over base_rows.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=stepped(right),
        causes=(
            (stepped(by_ranks), "the rate grows with the ranks, and the gradient does not: it is a mean over them"),
            (stepped(as_it_was), "the rate is base_lr, for base_rows rows; this step has another number of them"),
            (stepped(by_own_rows), "it counts this rank's rows; a step has those of all ranks"),
            (stepped(by_root), "that is the root of the batch's growth; this recipe scales in proportion"),
            (stepped(lambda own: right(own) * RANKS), "the gradient is a sum over the ranks where a mean is asked for"),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "all-reduces are all it takes"),),
    ),
    wrong=(
        Wrong(stub, "the rate grows with the ranks"),
        mutant(
            {"base_lr * of_all.item() / base_rows": "base_lr"},
            "the rate is base_lr, for base_rows rows",
            name="as it was",
        ),
        mutant({"of_all.item()": "len(rows)"}, "it counts this rank's rows", name="by own rows"),
        mutant(
            {"base_lr * of_all.item() / base_rows": "base_lr * (of_all.item() / base_rows) ** 0.5"},
            "that is the root of the batch's growth",
            name="by root",
        ),
        mutant({"gradient / dist.get_world_size()": "gradient"}, "the gradient is a sum over the ranks", name="summed"),
    ),
    shortcuts=(
        Wrong(lambda weight, rows, base_lr, base_rows: weight, "numbers differ"),
        Wrong(lambda weight, rows, base_lr, base_rows: weight - base_lr * (weight - rows).mean(0), "numbers differ"),
    ),
    covers=("misconception 11", "pitfall 36", "coverage 004.45", "coverage 004.73"),
    stub_says="the rate grows with the ranks",
)
