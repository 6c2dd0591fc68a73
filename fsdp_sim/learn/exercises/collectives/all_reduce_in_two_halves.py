"""Write all-reduce as a reduce-scatter and an all-gather."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, Inputs, OnlyCollectives, OnRanks

RANKS, NUMBERS = 4, 60_000


def all_reduce_in_two_halves(gradient):
    ranks = dist.get_world_size()
    missing = -len(gradient) % ranks
    padded = F.pad(gradient, (0, missing))
    own = torch.empty(len(padded) // ranks)
    dist.reduce_scatter_tensor(own, padded)
    dist.all_gather_into_tensor(padded, own)
    return padded[: len(gradient)]


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rest = int(torch.randint(1, RANKS, (1,), generator=draw))
    return [(torch.randn(NUMBERS + rest, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.stack([gradient for (gradient,) in inputs]).sum(0)] * RANKS


def rest_not_reduced(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.cat([in_one_process(inputs)[0][:NUMBERS], own[NUMBERS:]]) for (own,) in inputs]


def least_bytes(trial: Trial) -> float:
    (gradient,) = trial.each[0][0]
    return 2 * (RANKS - 1) / RANKS * len(gradient) * 4


def at_once(gradient):
    dist.all_reduce(gradient)
    return gradient


def everything_to_everyone(gradient):
    whole = torch.empty(dist.get_world_size() * len(gradient))
    dist.all_gather_into_tensor(whole, gradient)
    return whole.view(-1, len(gradient)).sum(0)


EXERCISE = Exercise(
    title="Write all-reduce as its two halves",
    kind=ExerciseKind.CODE,
    difficulty=2,
    importance=5,
    minutes=20,
    contract="Every rank has a gradient, a 1-D tensor of the same length, which need not be a multiple of the number "
    "of ranks. Return the sum over all ranks, whole, on every rank, with torch.distributed's reduce_scatter_tensor and "
    "all_gather_into_tensor (in newest torch: reduce_scatter_single, all_gather_single), both of which move equal "
    "pieces.",
    targets="Optimal: 2 (W-1)/W of the gradient sent, as a ring all-reduce does. A pass: up to 1.5 times that.",
    reference=all_reduce_in_two_halves,
    why="After the reduce-scatter each rank has one finished piece of the sum; the all-gather shows it to all. DDP "
    "runs the two in one go. FSDP puts the optimizer between them: a rank steps the piece that it has, and what is "
    "gathered later is not gradients but new parameters. Equal pieces need padding where the length does not divide: "
    "the zeros are added at the end, travel along, and are cut off again.",
    hints=(
        "After a reduce-scatter, which part of the sum does each rank have? What is left to do?",
        "Both collectives want a tensor that divides evenly. Make it long enough with zeros, and cut them off at the "
        "end.",
        "Pad by -len % ranks numbers, reduce-scatter into a tensor of a W-th, all-gather that, return the first len.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=((rest_not_reduced, "the numbers beyond the last even piece are this rank's own: pad, do not cut"),),
        checks=(
            OnlyCollectives(frozenset({"reduce_scatter", "all_gather"}), "build it from its two halves"),
            BytesSent(
                least_bytes,
                proof="a ring all-reduce sends as much, and none can send less when all ranks send alike",
                good=1.1,
                passes=1.5,
                cure="reduce first, so that only finished sums are gathered",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {
                "F.pad(gradient, (0, missing))": "gradient[: len(gradient) // ranks * ranks].clone()",
                "padded[: len(gradient)]": "torch.cat([padded, gradient[len(padded) :]])",
            },
            "pad, do not cut",
            name="forgets the rest",
        ),
        mutant({"padded[: len(gradient)]": "padded"}, "its shape should be", name="padding kept"),
        mutant({"padded[: len(gradient)]": "padded[: len(gradient)] / ranks"}, "4 times too small", name="mean"),
        Wrong(at_once, "expected only all_gather and reduce_scatter, found all_reduce"),
        Wrong(everything_to_everyone, "reduce first, so that only finished sums are gathered"),
    ),
    shortcuts=(
        Wrong(lambda gradient: gradient * RANKS, "numbers differ"),
        Wrong(lambda gradient: torch.zeros_like(gradient), "all of it is zero"),
    ),
    covers=("coverage 004.57", "misconception 14"),
)
