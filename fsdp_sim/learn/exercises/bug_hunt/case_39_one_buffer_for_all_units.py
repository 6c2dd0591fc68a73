"""A forward that is right, and a backward that is not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks, PeakBytes

RANKS, UNITS, WIDTH, ROWS = 2, 4, 384, 4
UNIT_BYTES = WIDTH * WIDTH * 4


stub = Edit(
    {
        "x.shape[1]), []": "x.shape[1]), []  # one buffer: one unit is whole at a time",
        (
            "x.register_hook(lambda _, shard=shard: dist.all_gather_into_tensor(buffer, shard))  # "
            "again, before backward"
        ): "",
    }
)


def case_39(shards, x):
    buffer, weights = torch.empty(x.shape[1], x.shape[1]), []
    for shard in shards:
        dist.all_gather_into_tensor(buffer, shard)
        weights.append(buffer.data.requires_grad_())
        x = torch.tanh(x @ weights[-1])
        x.register_hook(lambda _, shard=shard: dist.all_gather_into_tensor(buffer, shard))  # again, before backward
    x.square().sum().backward()
    return [weight.grad for weight in weights]


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(UNITS, WIDTH // RANKS, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(RANKS)]
    return [(list(mine.unbind()), torch.randn(ROWS, WIDTH, generator=draw)) for mine in rows]


def gradients(inputs: Inputs, seen_in_backward: Callable[[int], int] = lambda unit: unit) -> list[list[torch.Tensor]]:
    """By rank and unit, in closed form; ``seen_in_backward`` says whose weight a unit's backward finds."""
    weights = [torch.cat([shards[unit] for shards, _ in inputs]) for unit in range(UNITS)]
    found = []
    for _, x in inputs:
        xs = [x]
        for weight in weights:
            xs.append(torch.tanh(xs[-1] @ weight))
        above, mine = 2 * xs[-1], []
        for unit in reversed(range(UNITS)):
            inner = above * (1 - xs[unit + 1] ** 2)
            mine.append(xs[unit].T @ inner)
            above = inner @ weights[seen_in_backward(unit)].T
        found.append(mine[::-1])
    return found


def least_bytes(trial: Trial) -> int:
    return UNITS * UNIT_BYTES // RANKS + UNIT_BYTES + UNITS * UNIT_BYTES


def own_rows_only(shards, x):
    weights = [shard.repeat(dist.get_world_size(), 1).requires_grad_() for shard in shards]
    for weight in weights:
        x = torch.tanh(x @ weight)
    x.square().sum().backward()
    return [weight.grad for weight in weights]


EXERCISE = Exercise(
    title="Mend a backward that reads another unit's weight",
    kind=ExerciseKind.FAULT,
    difficulty=4,
    importance=4,
    minutes=30,
    contract="A hand-made FSDP: every rank has its rows of each unit's weight and its own x. The loss is right. Of "
    "the gradients, those of the last two units are right, all others are not; autograd does not complain. Mend it, "
    "and keep the memory as it is: no more than one unit is whole at a time. Return this rank's whole gradient of "
    "each weight.",
    targets="Optimal: the shards, the gradients that are returned, and one buffer.",
    reference=case_39,
    stub=stub,
    why="Autograd keeps for backward the very tensor that forward used: the buffer, in which by then stands the last "
    "unit's weight. It would notice, but .data hides the change from its count. So what was freed or overwritten "
    "after forward has to be gathered again before backward reads it. A hook on the unit's output runs just then; "
    "FSDP's pre_backward is that hook. Its own .data is called _unsafe_preserve_version_counter, and the name is a "
    "warning.",
    cause="units share one buffer, and backward does not gather again",
    hints=(
        "A unit's backward needs the unit's weight. What stands in the buffer when it runs?",
        "What forward has overwritten must be there again when backward comes to this unit, and not earlier.",
        "tensor.register_hook(f) on a unit's output calls f when backward arrives there; gather that unit again in it.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=gradients,
        causes=(
            (
                lambda inputs: gradients(inputs, lambda unit: UNITS - 1),
                "every unit's backward has read the last unit's weight, which stands in the buffer since forward ended",
            ),
            (
                lambda inputs: gradients(inputs, lambda unit: UNITS - 2 + unit % 2),
                "with two buffers in turn, backward finds the weights of the last two units in them",
            ),
            (
                lambda inputs: gradients(inputs, lambda unit: min(unit + 1, UNITS - 1)),
                "each unit's backward has read the weight of the unit above it: a hook on the input comes too late",
            ),
            (
                lambda inputs: gradients(inputs, lambda unit: 0),
                "every unit's backward has read the first unit's weight: each needs its own, when its turn comes",
            ),
        ),
        checks=(
            OnlyCollectives(frozenset({"all_gather"}), "all-gathers are all it takes"),
            PeakBytes(
                least_bytes,
                proof="its shards, a buffer, and the gradients",
                good=1.1,
                passes=1.25,
                cure="keep one buffer, and gather each unit into it again when its backward comes",
            ),
        ),
        metered=True,
        abs_=1e-3,
    ),
    wrong=(
        mutant(
            {
                "for shard in shards:": "for shard in shards:\n    buffer = torch.empty(x.shape[1], x.shape[1])",
                (
                    "x.register_hook(lambda _, shard=shard: dist.all_gather_into_tensor(buffer, shard))  # "
                    "again, before backward"
                ): "",
            },
            "keep one buffer, and gather each unit into it again",
            name="a buffer each",
        ),
        mutant(
            {
                "for shard in shards:": (
                    "for shard in shards:\n"
                    "    if x.requires_grad:\n"
                    "        x.register_hook(lambda _, shard=shard: dist.all_gather_into_tensor(buffer, shard))"
                ),
                (
                    "x.register_hook(lambda _, shard=shard: dist.all_gather_into_tensor(buffer, shard))  # "
                    "again, before backward"
                ): "",
            },
            "the weight of the unit above it",
            name="hooks on the input",
        ),
        mutant(
            {
                "for shard in shards:": (
                    "other = torch.empty_like(buffer)\nfor shard in shards:\n    buffer, other = other, buffer"
                ),
                (
                    "x.register_hook(lambda _, shard=shard: dist.all_gather_into_tensor(buffer, shard))  # "
                    "again, before backward"
                ): "",
            },
            "the weights of the last two units",
            name="two in turn",
        ),
        mutant(
            {
                (
                    "x.register_hook(lambda _, shard=shard: dist.all_gather_into_tensor(buffer, shard))  # "
                    "again, before backward"
                ): "",
                "x.square()": "dist.all_gather_into_tensor(buffer, shards[0])\nx.square()",
            },
            "the first unit's weight",
            name="the first again",
        ),
    ),
    shortcuts=(
        Wrong(own_rows_only, "expected"),
        Wrong(lambda shards, x: [torch.zeros(WIDTH, WIDTH)] * UNITS, "expected"),
    ),
    covers=("misconception 3",),
    stub_says="every unit's backward has read the last unit's weight",
)
