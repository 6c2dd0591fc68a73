"""Every rank logs another gradient norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import BytesSent, Inputs, OnlyCollectives, OnRanks

RANKS, MAX_NORM = 4, 1.0
SHAPES = ((100, 300), (25_000,))


def stub(shards, max_norm):
    norm = torch.cat([shard.flatten() for shard in shards]).norm()
    factor = min(1.0, max_norm / norm.item())
    return {"norm": norm.item(), "shards": [shard * factor for shard in shards]}


def case_14(shards, max_norm):
    squares = torch.cat([shard.flatten() for shard in shards]).square().sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    factor = min(1.0, max_norm / norm.item())
    return {"norm": norm.item(), "shards": [shard * factor for shard in shards]}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    sizes = 1 + torch.arange(RANKS)[torch.randperm(RANKS, generator=draw)]
    return [([torch.randn(shape, generator=draw) * size / 50 for shape in SHAPES], MAX_NORM) for size in sizes]


def small(seed: int) -> Inputs:
    """Gradients whose norm is below `MAX_NORM`: they are left as they are."""
    return [([shard / 100 for shard in shards], limit) for shards, limit in inputs(seed)]


def norms(inputs: Inputs) -> torch.Tensor:
    """Of each rank's shards."""
    return torch.stack([torch.cat([shard.flatten() for shard in shards]).norm() for shards, _ in inputs])


def clipped(inputs: Inputs, by: torch.Tensor) -> list[dict[str, Any]]:
    """Each rank's shards clipped by a norm of its own."""
    return [
        {"norm": float(norm), "shards": [shard * min(1.0, MAX_NORM / float(norm)) for shard in shards]}
        for (shards, _), norm in zip(inputs, by, strict=True)
    ]


def in_one_process(inputs: Inputs) -> list[dict[str, Any]]:
    return clipped(inputs, norms(inputs).norm().expand(RANKS))


def scaled_up(inputs: Inputs) -> list[dict[str, Any]]:
    norm = float(norms(inputs).norm())
    return [{"norm": norm, "shards": [shard * (MAX_NORM / norm) for shard in shards]} for shards, _ in inputs]


def least_bytes(trial: Trial) -> float:
    return len(trial.each[0]) * 2 * (RANKS - 1) / RANKS * 4


def gathers_gradients(shards, max_norm):
    flat = torch.cat([shard.flatten() for shard in shards])
    whole = torch.empty(RANKS * flat.numel())
    dist.all_gather_single(whole, flat)
    norm = whole.norm().item()
    return {"norm": norm, "shards": [shard * min(1.0, max_norm / norm) for shard in shards]}


def reduces_gradients(shards, max_norm):
    flat = torch.cat([shard.flatten() for shard in shards])
    whole = torch.zeros(RANKS, flat.numel())
    whole[dist.get_rank()] = flat
    dist.all_reduce(whole)
    norm = whole.norm().item()
    return {"norm": norm, "shards": [shard * min(1.0, max_norm / norm) for shard in shards]}


EXERCISE = Exercise(
    title="Mend a clipping with which every rank logs another norm",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Gradients are sharded over 4 ranks; this code clips them, as torch.nn.utils.clip_grad_norm_ does when it "
    "is given FSDP1's plain shards. Symptom: every rank logs another norm (0.21, 0.33, 0.24 and 0.46, where one "
    "process logs 0.65), and training wanders off. Mend it: if the norm of all ranks' shards together is above "
    "max_norm, scale all by max_norm / norm. Return {'norm': ..., 'shards': [...]}.",
    targets="Optimal: one all-reduce of one number. A pass: of up to 100.",
    reference=case_14,
    stub=stub,
    why="A norm is the root of a sum of squares, and sums may be added up over the ranks: square, all-reduce one "
    "number, take the root. No gradient has to travel. Clipped by its own norm each rank scales its rows by another "
    "factor, so that even the direction of the update is wrong. FSDP1's own model.clip_grad_norm_ does it right, and "
    "so does torch.nn.utils' with FSDP2, whose DTensors know that they are shards.",
    cause="the norm is taken over this rank's shards alone",
    hints=(
        "A rank scales its part by a factor of its own. What becomes of the direction of the whole gradient?",
        "Norms cannot be added up, but their squares can.",
        "Sum the squares of all this rank's shards into one number, all_reduce it, take the root; then clip as before.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        again=small,
        causes=(
            (lambda i: clipped(i, norms(i)), "it is the norm of this rank's shards only"),
            (lambda i: clipped(i, norms(i).sum().expand(RANKS)), "the norms were added up; their squares may be"),
            (lambda i: clipped(i, norms(i).mean().expand(RANKS)), "it is the mean of the ranks' norms"),
            (
                lambda i: clipped(i, norms(i).norm().expand(RANKS) / RANKS**0.5),
                "the squares were averaged over the ranks; their sum is the square of the norm",
            ),
            (scaled_up, "a norm below max_norm is no reason to scale: never up, only down"),
            (lambda i: clipped(i, norms(i).max().expand(RANKS)), "it is the largest of the ranks' norms"),
        ),
        checks=(
            OnlyCollectives(frozenset({"all_reduce"}), "no gradient has to travel to know the norm"),
            BytesSent(
                least_bytes,
                proof="one number has to be reduced",
                good=8,
                passes=100,
                cure="reduce a number, not the gradients",
            ),
        ),
        rel=1e-4,
    ),
    wrong=(
        Wrong(stub, "it is the norm of this rank's shards only"),
        mutant({".square().sum()": ".norm()", "squares.sqrt()": "squares"}, "the norms were added up", name="added"),
        mutant(
            {".square().sum()": ".norm()", "squares.sqrt()": "squares / RANKS"},
            "the mean of the ranks' norms",
            name="averaged",
        ),
        mutant(
            {
                ".square().sum()": ".norm()",
                "all_reduce(squares)": "all_reduce(squares, op=dist.ReduceOp.MAX)",
                "squares.sqrt()": "squares",
            },
            "the largest of the ranks' norms",
            name="largest",
        ),
        mutant({"min(1.0, max_norm / norm.item())": "max_norm / norm.item()"}, "never up, only down", name="scales up"),
        mutant({"squares.sqrt()": "(squares / RANKS).sqrt()"}, "the squares were averaged", name="mean of squares"),
        Wrong(gathers_gradients, "expected only all_reduce, found all_gather"),
        Wrong(reduces_gradients, "reduce a number, not the gradients"),
    ),
    shortcuts=(
        Wrong(lambda shards, max_norm: {"norm": 0.651, "shards": shards}, "expected"),
        Wrong(lambda shards, max_norm: {"norm": max_norm, "shards": [0 * shard for shard in shards]}, "expected"),
    ),
    covers=("pitfall 26", "misconception 6", "coverage 002.32", "coverage 001.36", "coverage 004.98"),
    stub_says="it is the norm of this rank's shards only",
)
