"""Write a mini-FSDP: the hooks of a unit."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import CollectiveOrder, Inputs, OnRanks, PeakBytes

RANKS, UNITS, WIDTH = 4, 3, 400


def hooks_of_a_unit(make_units, shards, train):
    def hook(unit, shard):
        weight = unit.weight

        def unshard(*_):
            weight.untyped_storage().resize_(weight.nbytes)
            dist.all_gather_single(weight.data, shard)

        def reshard(*_):
            weight.untyped_storage().resize_(0)

        def post_backward(*_):
            reshard()
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_single(shard.grad, weight.grad)
            shard.grad /= dist.get_world_size()
            weight.grad = None

        unit.register_forward_pre_hook(unshard)
        unit.register_forward_hook(reshard)
        unit.register_full_backward_pre_hook(unshard)
        weight.register_post_accumulate_grad_hook(post_backward)

    units = make_units()
    for unit, shard in zip(units, shards, strict=True):
        hook(unit, shard)
    train(units)
    return [shard.grad for shard in shards]


def make_units() -> list[nn.Linear]:
    units = []
    for _ in range(UNITS):
        units.append(nn.Linear(WIDTH, WIDTH, bias=False))
        units[-1].weight.untyped_storage().resize_(0)
    return units


def trains_on(x: torch.Tensor) -> Callable[[list[nn.Linear]], None]:
    """A forward and a backward of this rank's rows of the batch."""

    def train(units: list[nn.Linear]) -> None:
        y = x
        for unit in units:
            y = torch.tanh(unit(y))
        y.square().mean().backward()

    return train


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(UNITS, WIDTH, WIDTH, generator=draw) / WIDTH**0.5
    batch = torch.randn(RANKS, 1, WIDTH, generator=draw)
    return [
        (make_units, [weight.chunk(RANKS)[rank].clone() for weight in weights], trains_on(batch[rank]))
        for rank in range(RANKS)
    ]


def gradients_of_ranks(inputs: Inputs) -> torch.Tensor:
    """Of each rank and unit, whole, by one process."""
    found = []
    for _, _, train in inputs:
        units = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)]
        for i, unit in enumerate(units):
            unit.weight.data = torch.cat([shards[i] for _, shards, _ in inputs])
        train(units)
        found.append(torch.stack([unit.weight.grad for unit in units if unit.weight.grad is not None]))
    return torch.stack(found)


def in_one_process(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [list(gradients_of_ranks(inputs).mean(0).chunk(RANKS, dim=1)[rank]) for rank in range(RANKS)]


def summed(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [list(gradients_of_ranks(inputs).sum(0).chunk(RANKS, dim=1)[rank]) for rank in range(RANKS)]


def own_gradients(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [list(gradients_of_ranks(inputs)[rank].chunk(RANKS, dim=1)[rank]) for rank in range(RANKS)]


def as_issued(trial: Trial) -> list[str]:
    return ["all_gather"] * UNITS + ["all_gather", "reduce_scatter"] * UNITS


def least_bytes(trial: Trial) -> float:
    shards, shards_of_gradients = UNITS / RANKS, (UNITS - 1) / RANKS
    return (shards + shards_of_gradients + 2) * WIDTH * WIDTH * 4


EXERCISE = Exercise(
    title="Write the four hooks of a unit",
    kind=ExerciseKind.CODE,
    difficulty=4,
    importance=5,
    minutes=40,
    contract="A mini-FSDP without prefetch. make_units() makes three Linear units, whose weights have a shape and no "
    "memory; shards holds this rank's rows of each. Hook the units so that train(units), one forward and backward, "
    "gathers each weight before its forward and its backward, frees it after both, and reduce-scatters its gradient. "
    "Call train once; return the list of this rank's rows of the mean gradients.",
    targets="Optimal: never more than one unit whole: all shards, one whole weight, one whole gradient.",
    reference=hooks_of_a_unit,
    why="The tensor stays and its storage comes and goes: autograd saved this very tensor in forward, so a new one in "
    "backward would not be read, and an old one would not be free. Written through .data, what autograd saved "
    "counts as unchanged, and it is: the same numbers. The gradient hook runs when backward of the unit is done, so "
    "the weight can go before the gradient is reduced.",
    hints=(
        "Who calls you before and after a module's forward, before its backward, and once a gradient is there?",
        "Two functions do for three hooks: one gives the weight's storage memory and gathers, one takes it away.",
        "forward_pre_hook and full_backward_pre_hook gather into weight.data; forward_hook frees; in "
        "weight.register_post_accumulate_grad_hook free, reduce-scatter weight.grad, divide, set it to None.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (summed, "it is the sum over the ranks where their mean is asked for"),
            (own_gradients, "these are rows of this rank's own gradients: they were never reduced"),
        ),
        checks=(
            CollectiveOrder(as_issued, "gather in forward, gather again and reduce in backward, unit by unit"),
            PeakBytes(
                least_bytes,
                proof="all shards, two gradients' shards, one whole weight and its whole gradient",
                good=1.1,
                passes=1.35,
                cure="take the memory from behind a weight after its forward, and after its backward",
            ),
        ),
        metered=True,
    ),
    wrong=(
        mutant({"unit.register_forward_hook(reshard)": ""}, "take the memory from behind a weight after its forward"),
        mutant(
            {"unit.register_forward_hook(reshard)": "", "unit.register_full_backward_pre_hook(unshard)": ""},
            "expected all_gather, found reduce_scatter",
        ),
        mutant({"shard.grad /= dist.get_world_size()": ""}, "it is the sum over the ranks"),
        mutant(
            {
                "dist.reduce_scatter_single(shard.grad, weight.grad)\nshard.grad /= dist.get_world_size()": (
                    "shard.grad.copy_(weight.grad.chunk(dist.get_world_size())[dist.get_rank()])"
                )
            },
            "they were never reduced",
        ),
        mutant(
            {
                "dist.reduce_scatter_single(shard.grad, weight.grad)": (
                    "dist.all_reduce(weight.grad)\n"
                    "shard.grad.copy_(weight.grad.chunk(dist.get_world_size())[dist.get_rank()])"
                )
            },
            "expected reduce_scatter, found all_reduce",
        ),
    ),
    shortcuts=(
        Wrong(lambda make_units, shards, train: [torch.zeros_like(shard) for shard in shards], "numbers differ"),
        Wrong(lambda make_units, shards, train: shards, "numbers differ"),
    ),
    covers=("coverage 004.88", "coverage 004.110", "coverage 004.31", "coverage 003.11"),
)
