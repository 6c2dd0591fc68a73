"""Out of memory, but only with gradient accumulation."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks, PeakBytes

RANKS, UNITS, MICRO_BATCHES, WIDTH = 2, 6, 3, 300
UNIT_BYTES = WIDTH * WIDTH * 4


def backward(vectors: torch.Tensor, unit: int) -> torch.Tensor:
    """The whole gradient of a unit, from one micro-batch."""
    return torch.outer(vectors[unit], vectors[unit])


def stub(micro_batches, units, backward):
    ranks = dist.get_world_size()
    whole: dict[int, torch.Tensor] = {}
    for batch in micro_batches:
        for unit in reversed(range(units)):
            gradient = backward(batch, unit)
            whole[unit] = gradient if unit not in whole else whole[unit].add_(gradient)
    shards = []
    for unit in range(units):  # the ranks communicate once, after the last micro-batch
        shards.append(torch.empty(len(whole[unit]) // ranks, whole[unit].shape[1]))
        dist.reduce_scatter_tensor(shards[unit], whole[unit])
        shards[unit] /= ranks
    return shards


def case_11(micro_batches, units, backward):
    ranks = dist.get_world_size()
    shards: dict[int, torch.Tensor] = {}
    for batch in micro_batches:
        for unit in reversed(range(units)):
            gradient = backward(batch, unit)
            shard = torch.empty(len(gradient) // ranks, gradient.shape[1])
            dist.reduce_scatter_tensor(shard, gradient)
            shard /= ranks
            shards[unit] = shard if unit not in shards else shards[unit].add_(shard)
            del gradient, shard  # before the next ones are made
    return [shards[unit] for unit in range(units)]


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    batches = torch.randn(RANKS, MICRO_BATCHES, UNITS, WIDTH, generator=draw)
    return [(list(mine.unbind()), UNITS, backward) for mine in batches]


def reduced(inputs: Inputs, first: int = 0) -> list[list[torch.Tensor]]:
    """From the micro-batches from ``first`` on."""
    sums = [
        sum(backward(batch, unit) for batches, *_ in inputs for batch in batches[first:]) / RANKS
        for unit in range(UNITS)
    ]
    return [[whole.chunk(RANKS)[rank] for whole in sums] for rank in range(RANKS)]  # type: ignore[union-attr]


def least_bytes(trial: Trial) -> int:
    batches = MICRO_BATCHES * UNITS * WIDTH * 4
    return batches + UNITS * UNIT_BYTES // RANKS + UNIT_BYTES + UNIT_BYTES // RANKS


def gathered_again(micro_batches, units, backward):
    shards = case_11(micro_batches, units, backward)
    wholes = [torch.empty(WIDTH, WIDTH) for _ in shards]
    for whole, shard in zip(wholes, shards, strict=True):
        dist.all_gather_into_tensor(whole, shard)
    return shards


def own_rows(micro_batches, units, backward):
    return [
        sum(backward(batch, unit).chunk(RANKS)[dist.get_rank()] for batch in micro_batches) for unit in range(units)
    ]


EXERCISE = Exercise(
    title="Mend a job that runs out of memory when it accumulates",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="This job trains well with one micro-batch per step and runs out of memory with three, however small they "
    "are. backward(batch, unit) returns the whole gradient of a unit. Return this rank's rows of each unit's gradient, "
    "summed over the micro-batches and averaged over the ranks, and hold no more than one whole gradient at a time.",
    targets="A pass: 1.35 times the least possible bytes; good 1.1 times; optimal the least.",
    reference=case_11,
    stub=stub,
    why="To communicate once per step a rank must keep the whole gradients of the whole model until then: with FSDP "
    "that is set_requires_gradient_sync(False), with FSDP1 no_sync(), and it costs what sharding saved. Reduce in "
    "every micro-batch and add up shards: more to send, a fraction of the memory.",
    cause="whole gradients of all units are kept until the last micro-batch",
    hints=(
        "What is alive between two micro-batches, and how large is it beside a shard?",
        "A sum may be taken before or after the reduction. Which order keeps only shards?",
        "For every micro-batch and unit: backward, reduce_scatter_tensor into a shard, add the shard to the unit's.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=reduced,
        causes=(
            (lambda inputs: reduced(inputs, MICRO_BATCHES - 1), "it is the gradient of the last micro-batch alone"),
            (
                lambda inputs: [[RANKS * shard for shard in mine] for mine in reduced(inputs)],
                "it is the sum over the ranks; the mean is asked for",
            ),
        ),
        checks=(
            OnlyCollectives(frozenset({"reduce_scatter"}), "gradients are reduced, and nobody needs them whole again"),
            PeakBytes(
                least_bytes,
                proof="the micro-batches, the gradient shards of all units, one whole gradient and its reduced shard",
                good=1.1,
                passes=1.35,
                cure="whole gradients wait for the last micro-batch; reduce each one at once and add up shards",
            ),
        ),
        metered=True,
        abs_=1e-3,
    ),
    wrong=(
        Wrong(stub, "whole gradients wait for the last micro-batch"),
        mutant(
            {"in micro_batches:": "in micro_batches[-1:]:"},
            "it is the gradient of the last micro-batch alone",
            name="last one only",
        ),
        mutant({"shard /= ranks": ""}, "it is the sum over the ranks", name="not averaged"),
        Wrong(gathered_again, "expected only reduce_scatter, found all_gather"),
        Wrong(own_rows, "numbers differ"),
    ),
    shortcuts=(
        Wrong(lambda micro_batches, units, backward: [torch.zeros(WIDTH // RANKS, WIDTH)] * units, "numbers differ"),
    ),
    covers=("pitfall 28", "coverage 002.29"),
    stub_says="whole gradients wait for the last micro-batch",
)
