"""Average gradients in buckets, as DDP does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.inside import WAIT
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks
from fsdp_sim.learn.verdict import Finding, Grade
from fsdp_sim.timeline import Op

RANKS, GRADIENTS = 4, 12
Cut = list[list[int]]
"""By bucket, the places of its gradients in the list."""


def ddp_buckets(gradients, bucket_bytes):
    pending, bucket = [], []
    for place, gradient in enumerate(gradients):
        bucket.append(gradient)
        if sum(g.nbytes for g in bucket) >= bucket_bytes or place == len(gradients) - 1:
            flat = torch.cat([g.flatten() for g in bucket])
            pending.append((dist.all_reduce(flat, async_op=True), flat, bucket))
            bucket = []
    means = []
    for work, flat, bucket in pending:
        work.wait()
        pieces = (flat / dist.get_world_size()).split([g.numel() for g in bucket])
        means += [piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)]
    return means


def cut(sizes: Sequence[int], limit: float) -> Cut:
    """A bucket is closed when it has reached the limit."""
    buckets: Cut = [[]]
    for place in range(len(sizes)):
        if sum(sizes[i] for i in buckets[-1]) >= limit:
            buckets.append([])
        buckets[-1].append(place)
    return buckets


def never_above(sizes: Sequence[int], limit: float) -> Cut:
    """A bucket is closed before the gradient that would pass the limit."""
    buckets: Cut = [[]]
    for place, size in enumerate(sizes):
        if buckets[-1] and sum(sizes[i] for i in buckets[-1]) + size > limit:
            buckets.append([])
        buckets[-1].append(place)
    return buckets


def from_the_end(sizes: Sequence[int], limit: float) -> Cut:
    last = len(sizes) - 1
    return [[last - place for place in bucket] for bucket in cut(sizes[::-1], limit)]


def last_first(sizes: Sequence[int], limit: float) -> Cut:
    return cut(sizes, limit)[::-1]


def limit_in_numbers(sizes: Sequence[int], limit: float) -> Cut:
    return cut(sizes, 4 * limit)


def one_each(sizes: Sequence[int], limit: float) -> Cut:
    return [[place] for place in range(len(sizes))]


def all_in_one(sizes: Sequence[int], limit: float) -> Cut:
    return [list(range(len(sizes)))]


MISTAKEN = {
    one_each: "that is one for each gradient: every all-reduce costs a latency, which is what buckets save",
    all_in_one: "that is one for all: it cannot begin before backward ends, so nothing of it is hidden",
    never_above: "a bucket is full when it has reached bucket_bytes, not before the gradient that passes it",
    from_the_end: "the buckets were filled from the end of the list, with what backward produces last",
    last_first: "the buckets are right and their order is not: the first one that is full goes first",
    limit_in_numbers: "bucket_bytes are bytes, not numbers: a number of fp32 has four (tensor.nbytes)",
}


def inputs(seed: int) -> Inputs:
    """Gradients of which each mistake makes other buckets, and the last bucket is not full."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(20, 200, (GRADIENTS,), generator=draw).tolist()
        shapes = [(r, 100) if place % 3 else (100 * r,) for place, r in enumerate(rows)]
        limit = int(torch.randint(60, 100, (1,), generator=draw)) * 1000
        sizes = [400 * r for r in rows]
        found = {tuple(numbers_of(sizes, how(sizes, limit))) for how in (cut, *MISTAKEN)}
        if len(found) == 1 + len(MISTAKEN) and 4 * numbers_of(sizes, cut(sizes, limit))[-1] < limit:
            break
    return [([torch.randn(shape, generator=draw) for shape in shapes], limit) for _ in range(RANKS)]


def numbers_of(sizes: Sequence[int], buckets: Cut) -> list[int]:
    """How many numbers each bucket holds."""
    return [sum(sizes[place] for place in bucket) // 4 for bucket in buckets]


def in_one_process(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [[torch.stack(same).mean(0) for same in zip(*(gradients for gradients, _ in inputs), strict=True)]] * RANKS


def summed(inputs: Inputs) -> list[list[torch.Tensor]]:
    return [[mean * RANKS for mean in in_one_process(inputs)[0]]] * RANKS


def last_bucket_left(inputs: Inputs) -> list[list[torch.Tensor]]:
    (gradients, limit), means = inputs[0], in_one_process(inputs)[0]
    first = cut([g.nbytes for g in gradients], limit)[-1][0]
    return [means[:first] + own[first:] for own, _ in inputs]


class InBuckets:
    """One all-reduce for each bucket, in order; and whether the first is waited for before the last is issued."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        gradients, limit = trial.each[0][0]
        sizes = [g.nbytes for g in gradients]
        expected = numbers_of(sizes, cut(sizes, limit))
        for rank, records in enumerate(ran.records):
            found = [record.numel for record in records]
            if found != expected:
                return Finding(Grade.NOT_YET, f"rank {rank}: {differ(expected, found)}{cause(sizes, limit, found)}.")
        many = f"{len(expected)} all-reduces for {len(sizes)} gradients"
        if any(waits_between(ran, rank) for rank in range(trial.ranks)):
            return Finding(Grade.PASS, f"{many}, some waited for before the last one is issued")
        return Finding(Grade.OPTIMAL, f"{many}, all of them issued before the first is waited for")


def differ(expected: list[int], found: list[int]) -> str:
    """The first difference."""
    if len(expected) != len(found):
        return f"expected {len(expected)} all-reduces, one for each bucket, found {len(found)}"
    i = next(i for i in range(len(expected)) if expected[i] != found[i])
    return f"all-reduce {i + 1}: expected {expected[i]:,} numbers, found {found[i]:,}"


def cause(sizes: list[int], limit: int, found: list[int]) -> str:
    causes = [text for how, text in MISTAKEN.items() if numbers_of(sizes, how(sizes, limit)) == found]
    return f"; {causes[0]}" if causes else ""


def waits_between(ran: TrialRun, rank: int) -> bool:
    """Whether this rank waited before its last all-reduce."""
    events = [event for event in ran.timeline.ops if event.rank == rank]
    last = max((i for i, event in enumerate(events) if event.op is Op.ALL_REDUCE), default=0)
    return any(event.unit == WAIT for event in events[:last])


def reduced(how, scale=1 / RANKS):
    """The same with other buckets."""

    def average(gradients, bucket_bytes):
        means = list(gradients)
        for places in how([g.nbytes for g in gradients], bucket_bytes):
            flat = torch.cat([gradients[place].flatten() for place in places])
            dist.all_reduce(flat)
            pieces = (flat * scale).split([gradients[place].numel() for place in places])
            for place, piece in zip(places, pieces, strict=True):
                means[place] = piece.view_as(gradients[place])
        return means

    return average


def only_full_ones(sizes: Sequence[int], limit: float) -> Cut:
    return [bucket for bucket in cut(sizes, limit) if sum(sizes[place] for place in bucket) >= limit]


def gathered(gradients, bucket_bytes):
    flat = torch.cat([g.flatten() for g in gradients])
    all_ranks = [torch.empty_like(flat) for _ in range(RANKS)]
    dist.all_gather(all_ranks, flat)
    pieces = torch.stack(all_ranks).mean(0).split([g.numel() for g in gradients])
    return [piece.view_as(g) for piece, g in zip(pieces, gradients, strict=True)]


def reduces_zeros(gradients, bucket_bytes):
    ddp_buckets([torch.zeros_like(g) for g in gradients], bucket_bytes)
    return gradients


EXERCISE = Exercise(
    title="Average gradients in buckets",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="`gradients` is a list of tensors in the order in which backward produces them, of the same shapes on "
    "every rank. Average each over the ranks with dist.all_reduce, as DDP does: fill a bucket with one gradient after "
    "the other; as soon as it holds bucket_bytes or more it is full, and one all-reduce takes all of it, flat. The "
    "last bucket is reduced with what it holds. Return the means as a list, in the same order and shapes.",
    targets="Optimal: every all-reduce is issued before the first is waited for, so that backward could go on. A "
    "pass: each is waited for before the next.",
    reference=ddp_buckets,
    why="One all-reduce for each gradient costs a latency for each; one for all cannot begin before backward has "
    "ended. Buckets are between: few collectives, and the first leaves while backward computes the next gradients, if "
    "nobody waits for it yet (async_op=True). They are filled in backward's order, from the last layer to the first, "
    "and all ranks must fill them alike, since collectives match by order. FSDP's units are its buckets.",
    hints=(
        "What would one all-reduce for each gradient cost, and what one for all of them? When could that begin?",
        "A full bucket is reduced at once, and never mind the next gradients. What if the last is never full?",
        "torch.cat of the flattened gradients, all_reduce with async_op=True, keep (work, flat, bucket) in a list. "
        "After the loop wait for each, divide, split by numel, view_as.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (lambda inputs: [gradients for gradients, _ in inputs], "these are this rank's own gradients"),
            (summed, f"it is {RANKS} times too large: a sum over {RANKS} ranks where the mean is asked for"),
            (last_bucket_left, "the gradients of the last bucket, which is never full, are this rank's own"),
        ),
        checks=(OnlyCollectives(frozenset({"all_reduce"}), "one all-reduce for each bucket"), InBuckets()),
    ),
    wrong=(
        Wrong(reduced(only_full_ones), "the last bucket, which is never full"),
        mutant({"(flat / dist.get_world_size())": "flat"}, "4 times too large"),
        mutant(
            {"[piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)]": "pieces"},
            "its shape should be",
            name="flattened",
        ),
        Wrong(reduced(one_each), "every all-reduce costs a latency"),
        Wrong(reduced(all_in_one), "cannot begin before backward ends"),
        Wrong(reduced(never_above), "when it has reached bucket_bytes"),
        Wrong(reduced(from_the_end), "filled from the end of the list"),
        Wrong(reduced(last_first), "the first one that is full goes first"),
        Wrong(reduced(limit_in_numbers), "bytes, not numbers"),
        Wrong(gathered, "expected only all_reduce, found all_gather"),
    ),
    shortcuts=(
        Wrong(reduces_zeros, "these are this rank's own gradients"),
        Wrong(lambda gradients, bucket_bytes: [0 * g for g in gradients], "expected"),
    ),
    covers=("coverage 004.57", "coverage 000.2"),
)
