"""DistributedSampler gives each sample once: does it?"""

from __future__ import annotations

import random
from typing import Any

from torch.utils.data import DistributedSampler

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges import Numbers


def samples_drawn_twice(samples, ranks):
    data: Any = range(samples)
    drawn: list[int] = []
    for rank in range(ranks):
        drawn += DistributedSampler(data, ranks, rank)
    return len(drawn) - len(set(drawn))


def padded(samples: int, ranks: int) -> int:
    """By how many samples the sampler's own total is above what there is."""
    data: Any = range(samples)
    return DistributedSampler(data, ranks, 0).total_size - samples


def cases(draw: random.Random) -> list[tuple[int, int]]:
    odd = [(ranks * draw.randint(5, 60) + draw.randint(1, ranks // 2 - 1), ranks) for ranks in (6, 8, 16)]
    return [*odd, (10, 4), (8 * draw.randint(5, 60), 8)]


EXERCISE = Exercise(
    title="Settle how often DistributedSampler repeats itself",
    kind=ExerciseKind.NUMBER,
    difficulty=1,
    importance=4,
    minutes=10,
    contract='"DistributedSampler gives each sample to exactly one rank." Given the number of samples of a data set '
    "and the number of ranks, return how many samples of one epoch are drawn a second time, with the sampler's "
    "defaults. An experiment settles it: DistributedSampler(range(samples), ranks, rank) can be iterated over.",
    reference=samples_drawn_twice,
    why="All ranks must do the same number of steps, or the collectives do not meet. So the sampler fills up to the "
    "next multiple of the ranks with samples from the start: 10 over 4 become 12. In training that hardly matters, or "
    "drop the rest with drop_last=True; in an evaluation it makes the mean wrong, so leave the repeated ones out "
    "there.",
    hints=(
        "Ten samples, four ranks, and every rank must do as many steps as the others. How many samples has each?",
        "It fills up rather than leaves out: to which number?",
        "Collect what the samplers of all ranks draw into one list, and compare its length with that of its set.",
    ),
    judge=Numbers(
        truth=padded,
        source="counted from the sampler's own total",
        cases=cases,
        where="for {samples} samples and {ranks} ranks",
        unit="samples",
    ),
    wrong=(
        Wrong(lambda samples, ranks: 0, "it fills up the last round, so that all ranks do as many steps"),
        Wrong(lambda samples, ranks: samples % ranks, "that many would be left over; it fills up what is missing"),
        Wrong(lambda samples, ranks: ranks - samples % ranks, "where the samples divide evenly nothing is missing"),
    ),
    shortcuts=(Wrong(lambda samples, ranks: 2, "expected"),),
    covers=("misconception 37", "pitfall 37"),
)
