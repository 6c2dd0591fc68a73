"""Write how a unit's gradients become this rank's part of their mean."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, CollectiveOrder, Inputs, OnRanks

RANKS = 4
SHAPES = ((8, 5_000), (4, 10_000), (16, 2_500))


def reduce_scatter_gradients(gradients):
    ranks = dist.get_world_size()
    pieces = torch.cat([g.view(ranks, -1) for g in gradients], dim=1)  # row r: what rank r will keep
    own = torch.empty(pieces.shape[1])
    dist.reduce_scatter_single(own, pieces.flatten())
    rows = (own / ranks).split([g.numel() // ranks for g in gradients])
    return [piece.view(-1, g.shape[1]) for piece, g in zip(rows, gradients, strict=True)]


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [([torch.randn(shape, generator=draw) for shape in SHAPES],) for _ in range(RANKS)]


def sums(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.stack([gradients[i] for (gradients,) in inputs]).sum(0) for i in range(len(SHAPES))]


def in_one_process(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [[(total / RANKS).chunk(RANKS)[rank] for total in sums(inputs)] for rank in range(RANKS)]


def not_divided(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [[total.chunk(RANKS)[rank] for total in sums(inputs)] for rank in range(RANKS)]


def own_rows(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [[g.chunk(RANKS)[rank] for g in gradients] for rank, (gradients,) in enumerate(inputs)]


def cut_flat(inputs: Inputs) -> list[list[torch.Tensor]]:
    flat = torch.cat([(total / RANKS).flatten() for total in sums(inputs)])
    sizes = [rows // RANKS * columns for rows, columns in SHAPES]
    return [
        [p.view(-1, shape[1]) for p, shape in zip(flat.chunk(RANKS)[rank].split(sizes), SHAPES, strict=True)]
        for rank in range(RANKS)
    ]


def least_bytes(trial: Trial) -> float:
    return (RANKS - 1) / RANKS * sum(rows * columns for rows, columns in SHAPES) * 4


def own_only(gradients):
    return [g.chunk(dist.get_world_size())[dist.get_rank()] for g in gradients]


def one_by_one(gradients):
    found = []
    for g in gradients:
        own = torch.empty(g.shape[0] // dist.get_world_size(), g.shape[1])
        dist.reduce_scatter_single(own, g)
        found.append(own / dist.get_world_size())
    return found


def as_ddp(gradients):
    flat = torch.cat([g.flatten() for g in gradients])
    dist.all_reduce(flat)
    whole = (flat / dist.get_world_size()).split([g.numel() for g in gradients])
    return own_only([w.view_as(g) for w, g in zip(whole, gradients, strict=True)])


EXERCISE = Exercise(
    title="Reduce a unit's gradients to this rank's rows of their mean",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=25,
    contract="After a unit's backward every rank has whole gradients of all its parameters, from its own rows of the "
    "batch: a list of matrices, whose rows can be divided by the number of ranks. Return, as a list of matrices, this "
    "rank's rows of their mean over the ranks (cut as torch.chunk would), with one reduce-scatter for all of them.",
    targets="Optimal: each rank sends (W-1)/W of its gradients, the least possible, in one collective.",
    reference=reduce_scatter_gradients,
    why="A reduce-scatter adds up row r of what all ranks bring and gives it to rank r; so row r must hold rank r's "
    "piece of every parameter, side by side. Cutting the flat unit into four instead is FSDP1's way. One collective "
    "for the unit pays the latency once. The sum becomes a mean because each rank's loss was a mean over its own rows.",
    hints=(
        "All-reduce and then throw away three quarters would give the same numbers. What was sent for nothing?",
        "Rank r receives the r-th quarter of the flat input: lay out the pieces of all parameters in that order.",
        "pieces = cat([g.view(ranks, -1) for g in gradients], dim=1); its row r goes to rank r; then divide and split.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (not_divided, "it is the sum over the ranks where their mean is asked for"),
            (own_rows, "these are rows of this rank's own gradients: nothing of the other ranks is in them"),
            (cut_flat, "the flat unit was cut into contiguous pieces, as FSDP1 does, not each parameter into its rows"),
        ),
        checks=(
            CollectiveOrder(lambda trial: ["reduce_scatter"], "one reduce-scatter for the whole unit"),
            BytesSent(
                least_bytes,
                proof="its numbers for the other ranks' rows have to leave it once",
                good=1.1,
                passes=1.5,
                cure="send each number once",
            ),
        ),
    ),
    wrong=(
        mutant({"(own / ranks)": "own"}, "it is the sum over the ranks", name="sum only"),
        Wrong(own_only, "nothing of the other ranks is in them"),
        mutant(
            {
                "torch.cat([g.view(ranks, -1) for g in gradients], dim=1)  # row r: what rank r will keep": (
                    "torch.cat([g.flatten() for g in gradients])"
                ),
                "pieces.shape[1]": "len(pieces) // ranks",
            },
            "the flat unit was cut into contiguous pieces",
            name="flat pieces",
        ),
        Wrong(one_by_one, "expected nothing more, found reduce_scatter"),
        Wrong(as_ddp, "expected reduce_scatter, found all_reduce"),
    ),
    shortcuts=(
        Wrong(lambda gradients: [g[: len(g) // 4] * 0 for g in gradients], "numbers differ"),
        Wrong(lambda gradients: [], "3 values are asked for, not 0"),
    ),
    covers=("coverage 000.7", "coverage 000.13", "coverage 003.12"),
)
