"""Right numbers, at twice the price."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, Inputs, OnRanks

RANKS, NUMBERS = 4, 80_000


def stub(gradient):
    ranks = dist.get_world_size()
    dist.all_reduce(gradient)
    return gradient.chunk(ranks)[dist.get_rank()] / ranks


def case_38(gradient):
    ranks = dist.get_world_size()
    mine = torch.empty(len(gradient) // ranks)
    dist.reduce_scatter_tensor(mine, gradient)
    return mine / ranks


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [(torch.randn(NUMBERS, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return list(torch.stack([gradient for (gradient,) in inputs]).mean(0).chunk(RANKS))


def least_bytes(trial: Trial) -> int:
    return (RANKS - 1) * NUMBERS * 4 // RANKS


def adds_up_at_home(gradient):
    ranks = dist.get_world_size()
    everyones = torch.empty(ranks * len(gradient))
    dist.all_gather_into_tensor(everyones, gradient)
    return everyones.view(ranks, -1).mean(0).chunk(ranks)[dist.get_rank()]


def in_pieces(gradient):
    """An all-reduce of each piece, of which one is kept."""
    ranks = dist.get_world_size()
    pieces = list(gradient.chunk(ranks))
    for piece in pieces:
        dist.all_reduce(piece)
    return pieces[dist.get_rank()] / ranks


EXERCISE = Exercise(
    title="Mend a sharded training that sends too much",
    kind=ExerciseKind.FAULT,
    difficulty=1,
    importance=4,
    minutes=8,
    contract="Every number is right, and the job sends more than the formula for FSDP says: for gradients twice as "
    "much. A rank is given its whole gradient of a unit and returns its part, the mean over the ranks: of the flat "
    "gradient the piece of its rank. Mend it.",
    targets="Optimal: (W-1)/W of the gradient's bytes sent by each rank.",
    reference=case_38,
    stub=stub,
    why="An all-reduce is a reduce-scatter and an all-gather. Who keeps one part of the result has paid for the "
    "second half in vain, and holds a whole gradient where a shard would do: the part is a view of it. Every number "
    "is right, so no test of the loss finds it. Counting collectives does: FSDP reduces by reduce-scatter alone. "
    "(gloo itself does a reduce-scatter by an all-reduce; what is counted here is what a ring would send.)",
    cause="gradients are all-reduced where each rank needs its shard only",
    hints=(
        "Which part of what this collective brings is used? Who else has the rest?",
        "An all-reduce does two things one after the other. Which of them is enough?",
        "There is a collective that leaves each rank with the sum of its own piece; its output has the piece's size.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(
            BytesSent(
                least_bytes,
                proof="of every other rank's piece a rank has a share that only it knows",
                good=1.1,
                passes=1.5,
                cure="a collective that gives each rank only its own piece sends half of an all-reduce",
            ),
        ),
    ),
    wrong=(
        Wrong(adds_up_at_home, "expected at most"),
        Wrong(in_pieces, "sends half of an all-reduce"),
        mutant({"mine / ranks": "mine"}, "4 times too large", name="not divided"),
        mutant(
            {"(mine, gradient)": "(mine, gradient.roll(-len(gradient) // ranks))"},
            "every rank holds what rank + 1 should",
            name="the neighbours",
        ),
    ),
    shortcuts=(
        Wrong(lambda gradient: gradient.chunk(RANKS)[dist.get_rank()], "numbers differ"),
        Wrong(lambda gradient: torch.zeros(NUMBERS // RANKS), "all of it is zero"),
    ),
    covers=("misconception 14",),
    stub_says="sends half of an all-reduce",
)
