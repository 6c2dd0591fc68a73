"""Reshard a checkpoint of four ranks for two."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.learn.judges.account import belied
from fsdp_sim.learn.verdict import Finding, Grade

OLD, NEW, COLUMNS, LARGE = 4, 2, 3, 50_000
MOST = 2.1  # times the bytes of the whole


def reshard_checkpoint(shards, rank):
    rows = sum(len(shard) for shard in shards)
    most = -(-rows // 2)  # of a new rank: divided, and rounded up
    first, last = rank * most, min((rank + 1) * most, rows)
    mine, start = [], 0  # start: the row of the whole at which a shard begins
    for shard in shards:
        mine.append(shard[max(first - start, 0) : max(last - start, 0)])
        start += len(shard)
    return torch.cat(mine)


def cut(whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """As `torch.chunk`, and empty shards for the ranks that it leaves out. Each has its own storage."""
    chunks = [chunk.clone() for chunk in whole.chunk(ranks)]
    return chunks + [whole[:0].clone() for _ in range(ranks - len(chunks))]


def from_the_whole(shards: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    return cut(torch.cat(list(shards)), NEW)[rank]


def cases(draw: random.Random) -> list[tuple[list[torch.Tensor], int]]:
    """Few rows, of which some ranks have none, and some more; at last many, so that what is held shows."""
    numbers = torch.Generator().manual_seed(draw.randrange(2**32))
    few = [(rows, rank) for rows in (1, 2, 3, 5, 6, 9) for rank in range(NEW)]
    more = [(draw.randint(10, 200), draw.randrange(NEW)) for _ in range(20)]
    many = [(4 * LARGE + draw.choice((1, 2)), 1)]
    return [(cut(torch.randn(rows, COLUMNS, generator=numbers), OLD), rank) for rows, rank in few + more + many]


@dataclass(frozen=True)
class RowByRow:
    """The rows, and how many bytes were held besides what was given and what is returned."""

    rows: Numbers

    def trial(self, seed: int) -> Trial:
        return replace(self.rows.trial(seed), metered=True)

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        finding = self.rows.grade(trial, ran, wrong)
        if finding.grade is Grade.NOT_YET:
            return finding
        given = [sum(shard.nbytes for shard in shards) for shards, _ in trial.each[0]]
        besides = ran.peak_bytes[0] - sum(given) - sum(answer.nbytes for answer in ran.answers[0])
        if why := belied(ran, 0, sum(answer.nbytes for answer in ran.answers[0]) + max(besides, 0)):
            return Finding(Grade.NOT_YET, why)
        held = f"{max(besides, 0):,} bytes held besides the shards and the rows that are returned"
        if besides > MOST * max(given):
            return Finding(
                Grade.NOT_YET,
                f"expected at most {MOST * max(given):,.0f}, found {held}; the whole tensor stands there more than "
                "twice: copy only the rows that are asked for.",
            )
        if besides > 0.1 * max(given):
            return Finding(Grade.PASS, f"{finding.message} But {held}: the whole was put together.")
        return Finding(Grade.OPTIMAL, f"{finding.message} And {held}: the whole is nowhere.")


def neighbours(shards, rank):
    return torch.cat(shards[2 * rank : 2 * rank + 2])


def rounded_down(shards, rank):
    whole = torch.cat(shards)
    half = len(whole) // NEW
    return whole[rank * half : (rank + 1) * half] if rank == 0 else whole[half:]


def only_full_halves(shards, rank):
    whole = torch.cat(shards)
    half = len(whole) // NEW
    return whole[rank * half : (rank + 1) * half]


def every_other(shards, rank):
    return torch.cat([shards[rank], shards[rank + 2]])


def flat_when_empty(shards, rank):
    rows = from_the_whole(shards, rank)
    return rows if len(rows) else torch.empty(0)


def chunk_alone(shards, rank):
    return torch.cat(shards).chunk(NEW)[rank]


def padded(shards, rank):
    rows = from_the_whole(shards, rank)
    return torch.cat([rows, torch.zeros(len(from_the_whole(shards, 0)) - len(rows), rows.shape[1])])


def whole_in_copies(shards, rank):
    whole = torch.cat(shards)
    copies = torch.stack([whole, whole, whole])
    return cut(copies[0], NEW)[rank]


EXERCISE = Exercise(
    title="Reshard a checkpoint of four ranks for two",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="A tensor was saved from 4 ranks as 4 `shards`, cut along dimension 0 as torch.chunk cuts: 6 rows are 2, "
    "2, 2 and none; a rank without rows saved an empty shard of shape (0, columns). The job goes on with 2 ranks. "
    "Given the shards, in the order of their ranks, and the new `rank` (0 or 1), return the rows that this rank holds: "
    "those that torch.chunk would give it of the whole, or an empty shard. No communication, nothing but tensors.",
    targets="Optimal: the whole is never put together, only the rows of this rank are copied. A pass: it is put "
    "together, and held no more than twice.",
    reference=reshard_checkpoint,
    why="Both cuts are intervals of the same rows. An old shard begins where those before it end, whatever its own "
    "length; a new rank takes of each shard where the two intervals overlap, which is often nothing. That two old "
    "shards make one new one holds only where the rows divide by 4: 6 rows are 2, 2, 2, 0 on four ranks and 3, 3 on "
    "two. torch.distributed.checkpoint does this for every dimension, and reads from the files only what overlaps, "
    "since the whole may fit nowhere.",
    hints=(
        "5 rows on 4 ranks, then on 2: which rows has each? Does a new rank always get whole old shards?",
        "Write both cuts as intervals of rows of the whole. What a new rank takes of an old shard is the overlap.",
        "For each shard: it begins at row `start`; take shard[first - start : last - start], neither below 0; "
        "add its length to start. At last torch.cat.",
    ),
    judge=RowByRow(
        Numbers(
            truth=from_the_whole,
            source="cut by torch.chunk from the whole",
            cases=cases,
            where="new rank {rank}",
        )
    ),
    wrong=(
        Wrong(neighbours, "two old shards are not one new one: 6 rows are 2, 2, 2, 0 on four ranks and 3, 3 on two"),
        Wrong(rounded_down, "the quotient is rounded up: the first rank has one row more, not the last"),
        Wrong(only_full_halves, "the quotient was rounded down, so the last row is on no rank"),
        mutant(
            {
                "mine, start = [], 0  # start: the row of the whole at which a shard begins\nfor shard in shards:": (
                    "mine = []\nfor place, shard in enumerate(shards):\n    start = place * len(shard)"
                ),
                "start += len(shard)": "",
            },
            "an old shard begins where those before it end, not at its place times its own length",
            name="by its own length",
        ),
        Wrong(every_other, "shards are runs of rows: old ranks 0 and 2 do not lie beside each other"),
        Wrong(lambda shards, rank: shards[rank], "that is an old shard, as it was saved"),
        Wrong(flat_when_empty, "an empty shard has columns, too: its shape is (0, columns)"),
        Wrong(padded, "rows of zeros were added: a shard is as long as its rows, padding is for collectives only"),
        Wrong(chunk_alone, "IndexError"),
        Wrong(whole_in_copies, "the whole tensor stands there more than twice"),
    ),
    shortcuts=(Wrong(lambda shards, rank: torch.zeros(from_the_whole(shards, rank).shape), "numbers differ"),),
    covers=("pitfall 40", "coverage 004.84", "coverage 001.55"),
)
