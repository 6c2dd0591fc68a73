"""Answers about failures, computed in another way than the templates do: by letting the ranks run, or from what is
seen alone."""

import functools
import re
from collections import Counter, deque
from fractions import Fraction

import numpy as np
import torch


@functools.cache
def rank_that_never_came(last: tuple[int, ...], options: tuple[str, ...]) -> str:
    """Every rank issues what it has issued; who keeps the first collective from completing?"""
    issued = [set(range(min(last), n + 1)) for n in last]
    number = 1 + max(set.intersection(*issued))
    (missing,) = (rank for rank, of in enumerate(issued) if number not in of)
    assert f"rank {missing}" in options
    return f"rank {missing}"


@functools.cache
def first_to_part(records: tuple[tuple[str, ...], ...], first: int) -> str:
    for number, column in enumerate(zip(*records, strict=True), first):
        (_, many), *rest = Counter(column).most_common()
        if rest:
            assert many == len(records) - 1
            return f"rank {column.index(rest[0][0])}, at #{number:,}"
    raise AssertionError("they do not part")


@functools.cache
def collectives_before_the_hang(blocks: int, skipped: int) -> int:
    """Eight ranks step through the order that the specification gives, and meet in each collective."""

    def program(units: list[int]) -> deque[tuple[str, str]]:
        order = [("AG", "root"), *(("AG", "block") for _ in units)]
        for place, _ in enumerate(units):
            if place == 0:
                order.append(("AG", "block"))  # the last block's, in backward
            if place + 1 < len(units):
                order.append(("AG", "block"))  # prefetched before this block's gradients are reduced
            order.append(("RS", "block"))
        return deque([*order, ("RS", "root")])

    everything = list(range(blocks))
    ranks = [program(everything) for _ in range(7)] + [program([b for b in everything if b != skipped])]
    completed = 0
    while len({rank[0] for rank in ranks}) == 1:
        for rank in ranks:
            rank.popleft()
        completed += 1
    return completed


@functools.cache
def steps_before_the_hang(samples: tuple[int, ...], batch: int, drop: bool) -> int:
    loaders = [iter(torch.arange(n).split(batch)) for n in samples]
    steps = 0
    while True:
        for loader in loaders:
            rows = next(loader, None)
            if rows is None or (drop and len(rows) < batch):
                return steps
        steps += 1


@functools.cache
def fault_behind_the_update(right: tuple[float, ...], seen: tuple[float, ...]) -> str:
    """From the ratios that are seen."""
    ratios = [Fraction(b) / Fraction(a) for a, b in zip(right, seen, strict=True)]
    if len(set(ratios)) == 1:
        return {
            Fraction(0): "the optimizer was made before fully_shard",
            Fraction(4): "gradients are summed over the ranks, not averaged",
            Fraction(1, 4): "gradients are divided by the number of ranks twice",
        }[ratios[0]]
    if sorted(ratios) == [0, 1, 1, 1]:
        return "one rank does not step its shard"
    return "gradients are not reduced: each shard takes its own rank's"


@functools.cache
def missed_division(ranks: int, micro_batches: int, norm: float, seen: float) -> str:
    """A loss is a sum over equal samples; autograd runs over all micro-batches of all ranks, with each fault."""
    found = []
    for fault, of_loss, of_reduce in (
        ("the losses of micro-batches are not divided by their number", 1, ranks),
        ("gradients are summed over the ranks", micro_batches, 1),
        ("each rank divides its loss by the number of ranks", micro_batches * ranks, ranks),
        ("losses are divided by the number of micro-batches twice", micro_batches**2, ranks),
    ):
        weight = torch.zeros(2, dtype=torch.float64, requires_grad=True)  # of one rank; all are alike
        for _ in range(micro_batches):
            ((weight * norm * torch.tensor([0.6, 0.8], dtype=torch.float64)).sum() / of_loss).backward()
        assert weight.grad is not None
        reduced = torch.stack([weight.grad / of_reduce] * ranks).sum(0)
        if abs(reduced.norm().item() / seen - 1) < 1e-3:
            found.append(fault)
    (right,) = found
    return right


@functools.cache
def change_that_fits(parts: tuple[float, ...], limit_gb: float) -> str:
    """Of the changes, tried one after the other, the only one after which it fits."""
    changes = {
        "train on twice as many GPUs": (0.5, 1, 1, 1, 1),
        "give each block to fully_shard, not the model alone": (1, 0, 1, 1, 1),
        "reduce the gradients of every micro-batch": (1, 1, 0, 1, 1),
        "compute the activations of each block again in backward": (1, 1, 1, 0, 1),
        "compute the loss in pieces of a few hundred tokens": (1, 1, 1, 1, 0),
    }
    (right,) = (name for name, left in changes.items() if np.dot(left, parts) < limit_gb)
    assert sum(parts) > limit_gb
    return right


@functools.cache
def rows_that_are_lost(rows: int, ranks: int, rank: int) -> str:
    lost = torch.arange(rows).chunk(ranks)[rank]
    return f"rows {lost[0].item():,} to {lost[-1].item():,}"


@functools.cache
def checkpoint_that_counts(listing: tuple[str, ...], ranks: int) -> str:
    """Read the names in the folder, newest first."""
    for name in sorted(listing, key=lambda line: -int(re.search(r"step-(\d+)", line)[1])):  # type: ignore[index]
        if re.fullmatch(rf"step-\d+ \({ranks} files, \.metadata\)", name):
            return f"after step {name.split()[0].removeprefix('step-')}"
    raise AssertionError("none counts")


@functools.cache
def scale_of_one_rank(overflows: tuple[tuple[int, ...], ...], agree: bool, rank: int) -> float:
    """Step by step, after what each rank has found."""
    scales = [65536.0] * len(overflows)
    for step in range(1, 31):
        found = [step in of for of in overflows]
        scales = [
            scale / 2 if (any(found) if agree else inf) else scale for scale, inf in zip(scales, found, strict=True)
        ]
    return scales[rank]


@functools.cache
def slow_rank(shown_ms: tuple[int, ...]) -> str:
    """All kernels end together: go back from there to when each began."""
    began = {rank: 1000 - ms for rank, ms in enumerate(shown_ms)}
    return f"rank {max(began, key=lambda rank: began[rank])}"


@functools.cache
def where_nan_goes(ranks: int, each: int, made: int, row: int, clips: bool, other: int) -> str:
    (owner,) = (r for r, rows in enumerate(np.array_split(np.arange(ranks * each), ranks)) if row in rows)
    return _nan_of(ranks, owner, clips)


@functools.cache
def _nan_of(ranks: int, row: int, clips: bool) -> str:
    """Reduce, cut and clip real gradients, of one row for each rank."""
    gradients = torch.ones(ranks, ranks)
    gradients[0, row] = torch.nan
    shards = [torch.nn.Parameter(torch.zeros(1)) for _ in range(ranks)]
    for shard, mean in zip(shards, gradients.mean(0).chunk(ranks), strict=True):
        shard.grad = mean.clone()
    if clips:
        torch.nn.utils.clip_grad_norm_(shards, 1.0)
    hit = [rank for rank, shard in enumerate(shards) if shard.grad is not None and shard.grad.isnan().any()]
    return "on all ranks" if len(hit) == ranks else f"on rank {hit[0]} only" if hit else "on no rank"


@functools.cache
def first_look(symptom: str, options: tuple[str, ...]) -> str:
    """By what the symptom leaves unknown."""
    unknown = {
        "stand in": "last collective", "before step 1": "barrier", "memory": "peak", "one process": "first tensor",
        "twice as long": "waits least", "resume": "optimizer's state",
    }  # fmt: skip
    (key,) = (key for key in unknown if key in symptom)
    (right,) = (option for option in options if unknown[key] in option)
    return right


@functools.cache
def cost_of_a_hang(gpus: int, minutes: tuple[int, ...]) -> float:
    """What each GPU has done by the time at which it is again where it was, in seconds, added up."""
    return sum(60 * minute for minute in minutes for _ in range(gpus)) / 3600
