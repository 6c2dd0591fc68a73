"""Write what a rank keeps of a parameter, and how it becomes whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import CollectiveOrder, Inputs, OnRanks

RANKS, COLUMNS = 4, 20_000
ROWS = (6, 9)  # cut into four pieces, these leave the last rank without any row


def shard_and_unshard(weight):
    ranks = dist.get_world_size()
    rows = -(-len(weight) // ranks)  # of each piece: divided, and rounded up
    shard = weight[dist.get_rank() * rows :][:rows].clone()
    piece = torch.zeros(rows, weight.shape[1])  # of equal size on all ranks
    piece[: len(shard)] = shard
    gathered = torch.empty(ranks * rows, weight.shape[1])
    dist.all_gather_single(gathered, piece)
    return {"shard": shard, "whole": gathered[: len(weight)]}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rows = ROWS[int(torch.randint(len(ROWS), (1,), generator=draw))]
    return [(torch.randn(rows, COLUMNS, generator=draw),) for _ in range(RANKS)]


def pieces(inputs: Inputs) -> list[torch.Tensor]:
    """By rank, its rows of its own weight, as `torch.chunk` cuts: the last pieces may be missing."""
    found = []
    for rank, (weight,) in enumerate(inputs):
        chunks = weight.chunk(RANKS)
        found.append(chunks[rank] if rank < len(chunks) else weight[:0])
    return found


def in_one_process(inputs: Inputs) -> list[dict[str, Any]]:
    return [{"shard": shard, "whole": torch.cat(pieces(inputs))} for shard in pieces(inputs)]


def own_weights(inputs: Inputs) -> list[dict[str, Any]]:
    return [{"shard": shard, "whole": weight} for shard, (weight,) in zip(pieces(inputs), inputs, strict=True)]


def with_padding(inputs: Inputs) -> list[dict[str, Any]]:
    rows = -(-len(inputs[0][0]) // RANKS)
    padded = [torch.cat([piece, torch.zeros(rows - len(piece), COLUMNS)]) for piece in pieces(inputs)]
    return [{"shard": piece, "whole": torch.cat(padded)} for piece in pieces(inputs)]


def padded_shards(inputs: Inputs) -> list[dict[str, Any]]:
    rows = -(-len(inputs[0][0]) // RANKS)
    return [
        right | {"shard": torch.cat([right["shard"], torch.zeros(rows - len(right["shard"]), COLUMNS)])}
        for right in in_one_process(inputs)
    ]


def adds_up(weight):
    rows = -(-len(weight) // dist.get_world_size())
    first = dist.get_rank() * rows
    whole = torch.zeros_like(weight)
    whole[first : first + rows] = weight[first : first + rows]
    dist.all_reduce(whole)
    return {"shard": weight[first : first + rows], "whole": whole}


def as_objects(weight):
    chunks = weight.chunk(dist.get_world_size())
    rank = dist.get_rank()
    shard = chunks[rank] if rank < len(chunks) else weight[:0]
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, shard)
    return {"shard": shard, "whole": torch.cat(found)}


EXERCISE = Exercise(
    title="Shard a parameter and make it whole again",
    kind=ExerciseKind.CODE,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="Each of 4 ranks is given a weight of the same shape (their numbers differ: each rank has drawn its own). "
    "Rank r keeps the rows that torch.chunk(weight, 4) would give it, possibly none. Then make the weight whole with "
    "one dist.all_gather_single (its older name is all_gather_into_tensor), which takes pieces of equal size. Return "
    "{'shard': ..., 'whole': ...}.",
    reference=shard_and_unshard,
    why="Rows are contiguous, so padding at the end of the last pieces falls off the end of the gathered weight, and a "
    "view of the first rows is the parameter: no copy. FSDP2 does just this for each parameter. The whole weight here "
    "is a mosaic, since every rank kept rows of its own draw: nothing in FSDP2 broadcasts the initial weights, so "
    "give all ranks the same seed.",
    hints=(
        "Nine rows for four ranks: 3, 3, 3 and none. What does the last rank send, when all must send alike?",
        "A piece has ceil(rows / ranks) rows. Fill it up with zeros at its end, gather, and drop what is too much.",
        "piece = zeros(rows, columns); piece[: len(shard)] = shard; gather ranks * rows; keep the first ones.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (own_weights, "that is this rank's own weight: nothing has come from the other ranks"),
            (with_padding, "the padding is still at the end of the whole weight"),
            (padded_shards, "what travels is padded; the shard that a rank keeps has its own rows alone"),
        ),
        checks=(CollectiveOrder(lambda trial: ["all_gather"], "one all-gather of equal pieces"),),
    ),
    wrong=(
        mutant({"gathered[: len(weight)]": "weight"}, "nothing has come from the other ranks", name="keeps its own"),
        mutant({"gathered[: len(weight)]": "gathered"}, "the padding is still at the end", name="padding left in"),
        mutant(
            {
                "weight[dist.get_rank() * rows :][:rows].clone()": (
                    "weight.chunk(dist.get_world_size())[dist.get_rank()]"
                )
            },
            "IndexError",
            name="chunks only",
        ),
        mutant({'"shard": shard': '"shard": piece'}, "what travels is padded", name="keeps the padding"),
        Wrong(adds_up, "expected all_gather, found all_reduce"),
    ),
    shortcuts=(
        Wrong(as_objects, "found all_gather"),
        Wrong(lambda weight: {"shard": weight[:2] * 0, "whole": weight * 0}, "expected"),
    ),
    covers=("coverage 004.30", "coverage 004.35", "coverage 004.110", "pitfall 19"),
)
