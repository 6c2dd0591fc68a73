"""A load that puts other rows on the last rank."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, COLUMNS = 4, 256


stub = Edit(
    {
        "if rank != 0:": "if rank != 0:  # rank 0 alone has read the file",
        "first = min(rank * most, rows)  # where the ranks before end: they keep `most` rows each": (
            "mine = max(0, min(most, rows - rank * most))"
        ),
        "first : first + most": "rank * mine : (rank + 1) * mine",
    }
)


def case_02(whole, rows, columns):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank != 0:
        whole = torch.empty(rows, columns)
    dist.broadcast(whole, src=0)
    most = math.ceil(rows / ranks)
    first = min(rank * most, rows)  # where the ranks before end: they keep `most` rows each
    return whole[first : first + most].clone()


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    quotient, rest = (int(torch.randint(*span, (1,), generator=draw)) for span in ((60, 90), (1, RANKS - 1)))
    rows = RANKS * quotient + rest
    whole = torch.randn(rows, COLUMNS, generator=draw)
    return [(whole if rank == 0 else torch.empty(0), rows, COLUMNS) for rank in range(RANKS)]


def few(seed: int) -> Inputs:
    """Rows of which the last rank has none."""
    whole = torch.randn(RANKS + 1, COLUMNS, generator=torch.Generator().manual_seed(seed))
    return [(whole if rank == 0 else torch.empty(0), RANKS + 1, COLUMNS) for rank in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    pieces = list(inputs[0][0].chunk(RANKS))
    return [*pieces, *[torch.empty(0, COLUMNS)] * (RANKS - len(pieces))]


def by_own_rows(inputs: Inputs) -> list[torch.Tensor]:
    sizes = [len(piece) for piece in in_one_process(inputs)]
    return [inputs[0][0][rank * mine : (rank + 1) * mine] for rank, mine in enumerate(sizes)]


def rounded_down(inputs: Inputs) -> list[torch.Tensor]:
    less = inputs[0][1] // RANKS
    return [inputs[0][0][rank * less : (rank + 1) * less] for rank in range(RANKS)]


def fairly(inputs: Inputs) -> list[torch.Tensor]:
    return list(inputs[0][0].tensor_split(RANKS))


def rank_0_only(whole, rows, columns):
    most = math.ceil(rows / RANKS)
    first = dist.get_rank() * most
    return whole[first : first + most].clone() if dist.get_rank() == 0 else torch.zeros(most, columns)


EXERCISE = Exercise(
    title="Mend a load that goes wrong on the last rank",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Rank 0 has read a weight from a file (`whole`; the others are given an empty tensor), and each rank is "
    "to return the rows that fully_shard would leave it, as torch.chunk cuts. With 12 rows on 4 ranks the loss after "
    "loading is that before saving. With 10 rows it is higher, there is no error, and every shard has the right shape. "
    "Mend it.",
    reference=case_02,
    stub=stub,
    why="A rank begins where the ranks before it end, and they keep the rounded-up quotient each. The faulty code "
    "multiplies by the rows of *this* rank, which is the same number until the last rank has fewer: then it takes rows "
    "that another rank has too, and its own are nowhere. The shapes are right, so nothing complains. Let torch cut "
    "(distribute_tensor, set_model_state_dict), or test with sizes that do not divide.",
    cause="the offset is reckoned with this rank's number of rows, not with that of the ranks before it",
    hints=(
        "On which ranks is the result wrong? What is different about how many rows they keep?",
        "The first row of a rank depends on how many rows the ranks *before* it keep.",
        "Those before keep `most` rows each, so this rank begins at rank times that; then take at most `most` rows.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        again=few,
        causes=(
            (by_own_rows, "it begins at rank times its own number of rows; the ranks before it keep more than it does"),
            (rounded_down, "the quotient is rounded down, so the last rows are on no rank"),
            (fairly, "this is the fairest cut, torch.tensor_split's; fully_shard cuts as torch.chunk does"),
        ),
    ),
    wrong=(
        Wrong(stub, "the ranks before it keep more than it does"),
        mutant({"math.ceil(rows / ranks)": "rows // ranks"}, "so the last rows are on no rank", name="rounded down"),
        mutant(
            {"whole[first : first + most]": "whole.tensor_split(ranks)[rank]"},
            "fully_shard cuts as torch.chunk does",
            name="fairly",
        ),
        mutant({"whole[first : first + most]": "whole"}, "its shape should be"),
        mutant({"whole[first : first + most]": "whole.chunk(ranks)[rank]"}, "IndexError", name="chunks only"),
    ),
    shortcuts=(
        Wrong(rank_0_only, "3 of 4 ranks are wrong"),
        Wrong(lambda whole, rows, columns: torch.zeros(math.ceil(rows / RANKS), columns), "expected"),
    ),
    covers=("coverage 004.96",),
    stub_says="the ranks before it keep more than it does",
)
