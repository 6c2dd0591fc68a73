"""A step that hangs when one rank clips."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import CollectiveOrder, Inputs, OnRanks

RANKS, NUMBERS, LR, LIMIT = 4, 40_000, 0.1, 100.0


stub = Edit(
    {
        "dist.all_reduce(squares)  # on every rank, whatever its own part is": "",
        "if squares.sqrt() > limit:  # the same number on every rank: they all decide alike": (
            "if squares.sqrt() > limit:  # too large: clip\n    dist.all_reduce(squares)"
        ),
    }
)


def case_40(weights, gradients, limit, lr):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for gradient in gradients:
        mine = torch.empty(len(gradient) // ranks)
        dist.reduce_scatter(mine, list((gradient / ranks).chunk(ranks)))
        squares = mine.square().sum()
        dist.all_reduce(squares)  # on every rank, whatever its own part is
        if squares.sqrt() > limit:  # the same number on every rank: they all decide alike
            mine *= limit / squares.sqrt()
        part = weights.chunk(ranks)[rank] - lr * mine
        dist.all_gather(list(weights.chunk(ranks)), part)
    return weights


def inputs(seed: int) -> Inputs:
    """Four steps: nothing to clip; one part above the limit; no part, but all together; nothing to clip."""
    draw = torch.Generator().manual_seed(seed)
    odd = int(torch.randint(RANKS, (1,), generator=draw))
    of_parts = torch.full((4, RANKS), 0.3 * LIMIT)  # norms
    of_parts[1, odd], of_parts[2] = 1.5 * LIMIT, 0.7 * LIMIT
    means = torch.randn(4, RANKS, NUMBERS // RANKS, generator=draw)
    means *= (of_parts / means.norm(dim=2))[:, :, None]
    noise = torch.randn(RANKS, 4, NUMBERS, generator=draw)
    gradients = means.flatten(1) + noise - noise.mean(0)
    weights = torch.randn(NUMBERS, generator=draw)
    return [(weights, list(mine), LIMIT, LR) for mine in gradients]


Clip = Callable[[torch.Tensor], torch.Tensor]
"""From the mean gradient, by rank (rows), to what each part is scaled by (one number for each rank)."""


def factors(norms: torch.Tensor, clips: torch.Tensor) -> torch.Tensor:
    return torch.where(clips, LIMIT / norms, 1.0)


def of_all(parts: torch.Tensor) -> torch.Tensor:
    return factors(parts.norm().expand(RANKS), parts.norm() > LIMIT)


def of_own(parts: torch.Tensor) -> torch.Tensor:
    return factors(parts.norm(dim=1), parts.norm(dim=1) > LIMIT)


def asked_of_own(parts: torch.Tensor) -> torch.Tensor:
    return factors(parts.norm().expand(RANKS), parts.norm(dim=1) > LIMIT)


def asked_of_any(parts: torch.Tensor) -> torch.Tensor:
    return factors(parts.norm().expand(RANKS), (parts.norm(dim=1) > LIMIT).any())


def every_time(parts: torch.Tensor) -> torch.Tensor:
    return LIMIT / parts.norm().expand(RANKS)


def never(parts: torch.Tensor) -> torch.Tensor:
    return torch.ones(RANKS)


def summed(parts: torch.Tensor) -> torch.Tensor:
    norm = parts.norm(dim=1).sum()
    return factors(norm.expand(RANKS), norm > LIMIT)


def trained(inputs: Inputs, clip: Clip = of_all) -> list[torch.Tensor]:
    """In one process."""
    weights = inputs[0][0].clone()
    for step in range(len(inputs[0][1])):
        parts = torch.stack([gradients[step] for _, gradients, _, _ in inputs]).mean(0).view(RANKS, -1)
        weights -= LR * (parts * clip(parts)[:, None]).flatten()
    return [weights] * RANKS


EXERCISE = Exercise(
    title="Find the deadlock in a step that clips",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=5,
    minutes=10,
    contract="Each rank is given the weights (the same everywhere) and, for each step, the gradient of its own batch; "
    "it reduces gradients to its part of the mean, clips, steps its part and gathers the weights. It ran for days, "
    'then hung: "rank 2 waits in all_reduce, the others in all_gather". Find why and mend it: if the norm of the '
    "whole mean gradient is above the limit, every rank scales its part by limit / norm; otherwise none does. In each "
    "step all ranks issue the same three collectives. Return the weights after all steps.",
    reference=case_40,
    stub=stub,
    why="A collective under a condition on a rank's own data: only the ranks whose part is above the limit reduce, the "
    "others are at the next collective already, and both wait for ever. It ran for days because no part was ever "
    "large. To make all ranks enter the branch, or none, stops the hang but not the fault: four parts below the limit "
    "may be above it together. So first reduce, on every rank, and then ask: the norm is then the same number "
    "everywhere, and so is the decision. To find such a hang, compare the last collective of each rank.",
    cause="a collective stands in a branch that depends on this rank's own gradients",
    hints=(
        "Two lines of the log are enough: which rank is in which collective? Which condition brought it there?",
        "What does the condition ask about: this rank's part, or the whole gradient? On whom may it depend?",
        "Take the all_reduce of the squares out of the branch and put it before; let the condition look at its result.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=trained,
        causes=(
            (lambda i: trained(i, of_own), "each rank clips its part by the norm of that part"),
            (
                lambda i: trained(i, asked_of_own),
                "the norm is that of all, but a rank still asks whether its own part is above the limit",
            ),
            (
                lambda i: trained(i, asked_of_any),
                "in one step no part is above the limit and all together are: ask about the norm of the whole",
            ),
            (lambda i: trained(i, every_time), "steps whose norm is below the limit were scaled, too"),
            (lambda i: trained(i, never), "nothing was clipped"),
            (lambda i: trained(i, summed), "the norms of the parts were added up; their squares may be"),
        ),
        checks=(
            CollectiveOrder(
                lambda trial: ["reduce_scatter", "all_reduce", "all_gather"] * 4,
                "the three of each step, on every rank",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {"dist.all_reduce(squares)  # on every rank, whatever its own part is": ""},
            "by the norm of that part",
            name="by own norm",
        ),
        mutant(
            {"if squares.sqrt() > limit": "if mine.norm() > limit"},
            "a rank still asks whether its own part is above the limit",
            name="condition left",
        ),
        mutant(
            {
                "dist.all_reduce(squares)  # on every rank, whatever its own part is": (
                    "above = (mine.norm() > limit).float()\n"
                    "dist.all_reduce(above, op=dist.ReduceOp.MAX)\n"
                    "dist.all_reduce(squares)"
                ),
                "if squares.sqrt() > limit": "if above",
            },
            "no part is above the limit and all together are",
            name="if any is above",
        ),
        mutant(
            {"if squares.sqrt() > limit:  # the same number on every rank: they all decide alike\nmine": "mine"},
            "steps whose norm is below the limit were scaled",
            name="always",
        ),
        mutant({"mine *= limit / squares.sqrt()": "pass"}, "nothing was clipped", name="not at all"),
        mutant(
            {
                "mine.square().sum()": "mine.norm()",
                "if squares.sqrt()": "if squares",
                "limit / squares.sqrt()": "limit / squares",
            },
            "their squares may be",
            name="norms added",
        ),
        mutant(
            {
                (
                    "dist.all_reduce(squares)  # on every rank, whatever its own part is\n"
                    "if squares.sqrt() > limit:  # the same number on every rank: they all decide alike\n"
                    "mine *= limit / squares.sqrt()"
                ): (
                    "if mine.norm() > limit:\n"
                    "    dist.all_reduce(squares)\n"
                    "    mine *= limit / squares.sqrt()\n"
                    "else:\n"
                    "    dist.barrier()"
                )
            },
            "called a different collective",
            name="with a barrier",
        ),
        mutant(
            {
                (
                    "squares = mine.square().sum()\ndist.all_reduce(squares)  # on every rank, whatever its own part is"
                ): (
                    "parts = [torch.empty_like(mine) for _ in range(ranks)]\n"
                    "dist.all_gather(parts, mine)\n"
                    "squares = torch.cat(parts).square().sum()"
                )
            },
            "expected all_reduce, found all_gather",
            name="gathers the gradient",
        ),
    ),
    shortcuts=(
        Wrong(lambda weights, gradients, limit, lr: weights, "numbers differ"),
        Wrong(lambda weights, gradients, limit, lr: torch.zeros(NUMBERS), "all of it is zero"),
    ),
    covers=("pitfall 4", "pitfall 6", "misconception 35"),
    stub_says="called a different collective",
)
