"""Write a step that frees what it gathers, and reduces gradients as they come."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks, PeakBytes

RANKS, UNITS, WIDTH = 2, 4, 320
UNIT_BYTES = WIDTH * WIDTH * 4


def forward(whole: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One unit's forward."""
    return torch.tanh(whole @ x)


def backward(whole: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One unit's backward: the gradient of the whole weight, and that of the unit's input."""
    grad = grad * (1 - torch.tanh(whole @ x) ** 2)
    return torch.outer(grad, x), whole.T @ grad


def step_in_least_memory(shards, x, forward, backward):
    ranks, kept = dist.get_world_size(), []
    gradients: list[torch.Tensor] = []

    def gathered(shard):
        whole = torch.empty(ranks * shard.shape[0], shard.shape[1])
        dist.all_gather_into_tensor(whole, shard)
        return whole

    for shard in shards:
        kept.append(x)
        x = forward(gathered(shard), x)
    for shard in reversed(shards):
        whole_gradient, x = backward(gathered(shard), kept.pop(), x)
        gradients.insert(0, torch.empty_like(shard))
        dist.reduce_scatter_tensor(gradients[0], whole_gradient)
        gradients[0] /= ranks
        del whole_gradient  # before the next unit is gathered
    return gradients


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(UNITS, WIDTH // RANKS, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(RANKS)]
    return [(list(mine.unbind()), torch.randn(WIDTH, generator=draw), forward, backward) for mine in rows]


def of_each_rank(inputs: Inputs) -> list[list[torch.Tensor]]:
    """Whole gradients, by rank and unit."""
    wholes = [torch.cat([shards[unit] for shards, *_ in inputs]) for unit in range(UNITS)]
    found = []
    for _, x, *_ in inputs:
        kept: list[torch.Tensor] = []
        for whole in wholes:
            kept.append(x)
            x = forward(whole, x)
        gradients: list[torch.Tensor] = []
        for whole in reversed(wholes):
            gradient, x = backward(whole, kept.pop(), x)
            gradients.insert(0, gradient)
        found.append(gradients)
    return found


def in_one_process(inputs: Inputs) -> list[list[torch.Tensor]]:
    means = [torch.stack(of_ranks).mean(0).chunk(RANKS) for of_ranks in zip(*of_each_rank(inputs), strict=True)]
    return [[chunks[rank] for chunks in means] for rank in range(RANKS)]


def summed(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [[RANKS * shard for shard in mine] for mine in in_one_process(inputs)]


def own_rows(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [[whole.chunk(RANKS)[rank] for whole in mine] for rank, mine in enumerate(of_each_rank(inputs))]


def least_bytes(trial: Trial) -> int:
    return UNITS * UNIT_BYTES // RANKS + 2 * UNIT_BYTES + (UNITS - 1) * UNIT_BYTES // RANKS


EXERCISE = Exercise(
    title="Train a step within the least memory",
    kind=ExerciseKind.CODE,
    difficulty=4,
    importance=5,
    minutes=40,
    contract="Every rank has its rows of each unit's weight (shards, a list) and its own x. Forward: for each unit in "
    "turn x = forward(whole, x). Backward, from the last unit to the first, beginning with the gradient x (the last "
    "output): backward(whole, input_of_the_unit, gradient) returns the gradient of the whole weight and the gradient "
    "for the unit before. Return this rank's rows of each weight's gradient, averaged over the ranks, in order.",
    targets="A pass: 1.35 times the least possible bytes; good 1.05 times; optimal the least.",
    reference=step_in_least_memory,
    why="A unit is whole while it computes, twice per step, and its whole gradient lives until it is reduced: so at "
    "most one of each at a time, beside the shards. The last mile is Python's: a variable that still names the "
    "gradient of one unit while the next is gathered keeps a third unit's worth alive.",
    hints=(
        "Which tensors as large as a whole unit must exist at the same moment? Which could be gone?",
        "Gather again in backward instead of keeping what forward gathered; reduce each gradient when it is there.",
        "Do not bind what you gather to a name that outlives its use; del the whole gradient after its reduce-scatter.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (summed, "it is the sum over the ranks; the mean is asked for"),
            (own_rows, "these are rows of this rank's own gradients: nothing of the other ranks is in them"),
        ),
        checks=(
            OnlyCollectives(
                frozenset({"all_gather", "reduce_scatter"}), "one all-gather or reduce-scatter for each unit"
            ),
            PeakBytes(
                least_bytes,
                proof="its shards, one unit and its gradient whole, the other units' gradient shards",
                good=1.05,
                passes=1.35,
                cure="free a unit after its forward and gather it again, and reduce each gradient at once",
            ),
        ),
        metered=True,
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {
                "for shard in shards:": (
                    "wholes = dict(zip(shards, map(gathered, shards), strict=True))\nfor shard in shards:"
                ),
                "forward(gathered(shard)": "forward(wholes[shard]",
                "backward(gathered(shard)": "backward(wholes[shard]",
            },
            "free a unit after its forward and gather it again",
            name="keeps all whole",
        ),
        mutant(
            {
                "for shard in shards:": "later = []\nfor shard in shards:",
                (
                    "dist.reduce_scatter_tensor(gradients[0], whole_gradient)\n"
                    "gradients[0] /= ranks\n"
                    "del whole_gradient  # before the next unit is gathered"
                ): "later.insert(0, whole_gradient)",
                "return gradients": (
                    "for gradient, whole_gradient in zip(gradients, later, strict=True):\n"
                    "    dist.reduce_scatter_tensor(gradient, whole_gradient)\n"
                    "    gradient /= ranks\n"
                    "return gradients"
                ),
            },
            "and reduce each gradient at once",
            name="reduces last",
        ),
        mutant({"gradients[0] /= ranks": ""}, "it is the sum over the ranks"),
        mutant(
            {
                "dist.reduce_scatter_tensor(gradients[0], whole_gradient)\ngradients[0] /= ranks": (
                    "gradients[0].copy_(whole_gradient.chunk(ranks)[dist.get_rank()])"
                )
            },
            "nothing of the other ranks is in them",
        ),
    ),
    shortcuts=(
        Wrong(lambda shards, x, forward, backward: [torch.zeros_like(shard) for shard in shards], "numbers differ"),
    ),
    covers=("coverage 002.22", "coverage 004.37", "misconception 5"),
)
