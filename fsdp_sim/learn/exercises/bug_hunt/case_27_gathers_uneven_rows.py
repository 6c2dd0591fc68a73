"""An evaluation that dies without a word in its last batch."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, WIDTH = 3, 4096


def stub(predictions, rows):
    whole = torch.empty(dist.get_world_size() * rows, predictions.shape[1])
    dist.all_gather_into_tensor(whole, predictions)
    return whole


def case_27(predictions, rows):
    ranks = dist.get_world_size()
    counts = torch.empty(ranks, dtype=torch.long)
    dist.all_gather_into_tensor(counts, torch.tensor([len(predictions)]))
    padded = functional.pad(predictions, (0, 0, 0, rows - len(predictions)))
    whole = torch.empty(ranks * rows, predictions.shape[1])
    dist.all_gather_into_tensor(whole, padded)
    return torch.cat([part[:count] for part, count in zip(whole.chunk(ranks), counts, strict=True)])


def inputs(seed: int) -> Inputs:
    """Nobody has as many as another, and it is not the last that has fewest."""
    draw = torch.Generator().manual_seed(seed)
    least = int(torch.randint(13, 20, (1,), generator=draw))
    return [(torch.randn(least + more, WIDTH, generator=draw), least + 5) for more in (5, 0, 3)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return [torch.cat([rows for rows, _ in inputs])] * RANKS


def filled_up(inputs: Inputs) -> list[torch.Tensor]:
    most = max(len(rows) for rows, _ in inputs)
    return [torch.cat([functional.pad(rows, (0, 0, 0, most - len(rows))) for rows, _ in inputs])] * RANKS


def cut_down(inputs: Inputs) -> list[torch.Tensor]:
    least = min(len(rows) for rows, _ in inputs)
    return [torch.cat([rows[:least] for rows, _ in inputs])] * RANKS


def gathered(predictions):
    parts = [torch.empty_like(predictions) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, predictions)
    return torch.cat(parts)


def to_the_least(predictions, rows):
    least = torch.tensor(len(predictions))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return gathered(predictions[: int(least)])


def as_objects(predictions, rows):
    parts: list = [None] * dist.get_world_size()
    dist.gather_object(predictions, parts if dist.get_rank() == 0 else None)
    whole = torch.cat(parts) if dist.get_rank() == 0 else predictions
    shape = torch.tensor(whole.shape)
    dist.broadcast(shape, src=0)
    whole = whole if dist.get_rank() == 0 else torch.empty(*shape.tolist())
    dist.broadcast(whole, src=0)
    return whole


def only_the_last_is_short(predictions, rows):
    last = dist.get_rank() == dist.get_world_size() - 1
    return stub(functional.pad(predictions, (0, 0, 0, rows - len(predictions))) if last else predictions, rows)


EXERCISE = Exercise(
    title="Mend an evaluation that dies in its last batch",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=15,
    contract="Each rank has predictions for its rows of the validation set, one row each; `rows` is the most that a "
    "rank has. They are gathered, to compute a score. All batches go well but the last: some ranks fail, the others "
    "wait for them. Mend it: return the predictions of all ranks on every rank, in the order of the ranks, with "
    "all-gathers and all-reduces.",
    reference=case_27,
    stub=stub,
    why="The last batch is shared out unevenly, and an all-gather has one size. torch sees it here, because input and "
    "output of one rank do not fit. Between ranks nothing is compared: gloo notices in C++ and ends the process "
    "(SIGABRT, exit status -6, no traceback), NCCL waits or writes past the end. So pad to the largest and cut the "
    "padding off again. FSDP does the same with a parameter whose rows do not divide.",
    cause="ranks hand pieces of different sizes to one all-gather",
    hints=(
        "What is special about the last batch of a data set? Print the shape on each rank.",
        "All ranks must put in tensors of one shape. What can a rank do that has too little?",
        "Gather the numbers of rows, pad to `rows`, gather, and keep of each rank's part its own rows.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (filled_up, "the rows of zeros that filled the others up are still there: they count in every score"),
            (cut_down, "every rank has been cut to the rows of the one that has fewest: some are not evaluated"),
        ),
        checks=(OnlyCollectives(frozenset({"all_gather", "all_reduce"}), "gathers and reductions are all it takes"),),
    ),
    wrong=(
        mutant(
            {"torch.cat([part[:count] for part, count in zip(whole.chunk(ranks), counts, strict=True)])": "whole"},
            "they count in every score",
            name="keeps the padding",
        ),
        Wrong(to_the_least, "some are not evaluated"),
        Wrong(only_the_last_is_short, "invalid tensor size"),
        Wrong(as_objects, "expected only all_gather and all_reduce"),
    ),
    shortcuts=(
        Wrong(lambda predictions, rows: predictions, "its shape should be"),
        Wrong(lambda predictions, rows: predictions.repeat(RANKS, 1), "its shape should be"),
    ),
    covers=("pitfall 9",),
    stub_says="invalid tensor size",
)
