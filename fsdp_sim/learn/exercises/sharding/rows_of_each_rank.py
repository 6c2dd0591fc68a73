"""How many rows of a parameter does each rank keep?"""

from __future__ import annotations

import random

import torch

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.my_fsdp import rows_of_each_rank
from fsdp_sim.learn.judges import Numbers


def cut(rows: int, ranks: int) -> list[int]:
    """By torch."""
    pieces = [len(piece) for piece in torch.empty(rows, 1).chunk(ranks)]
    return pieces + [0] * (ranks - len(pieces))


def cases(draw: random.Random) -> list[tuple[int, int]]:
    ranks = draw.choice((4, 8))
    return [
        (draw.randint(20, 90) * ranks + draw.randint(1, ranks - 1), ranks),
        (ranks + 1, ranks),
        (3, ranks),
        (64, ranks),
    ]


def balanced(rows: int, ranks: int) -> list[int]:
    return [len(piece) for piece in torch.empty(rows, 1).tensor_split(ranks)]


def rest_at_the_end(rows: int, ranks: int) -> list[int]:
    return [rows // ranks] * (ranks - 1) + [rows // ranks + rows % ranks]


def rounded_down(rows: int, ranks: int) -> list[int]:
    return [rows // ranks] * ranks


EXERCISE = Exercise(
    title="Say how many rows each rank keeps",
    kind=ExerciseKind.NUMBER,
    difficulty=1,
    importance=4,
    minutes=10,
    contract="fully_shard cuts a parameter of `rows` rows over `ranks` ranks, as torch.chunk does. Return a list: how "
    "many rows each rank keeps, rank 0 first. The last ranks may keep fewer, or none.",
    reference=rows_of_each_rank,
    why="Every rank but the last ones keeps the quotient rounded up, so the ranks at the end get what is left, which "
    "may be nothing: 5 rows on 4 ranks are 2, 2, 1, 0. It is not the fairest cut, but a simple one: the first row of "
    "rank r is r times the rounded quotient, whatever the others have, and all padding falls at the very end of what "
    "is gathered.",
    hints=(
        "All pieces are equally long but the last: how long must they be so that `ranks` of them suffice?",
        "Round the quotient up. Rank r begins at r times that, and stops where the rows do.",
        "The smaller of the rounded quotient and of what is left from where the rank begins; never below 0.",
    ),
    judge=Numbers(
        truth=cut, source="cut by torch.chunk", cases=cases, where="{rows} rows over {ranks} ranks", unit="rows"
    ),
    wrong=(
        Wrong(balanced, "this is the fairest cut, torch.tensor_split's; torch.chunk rounds up, and the last go short"),
        Wrong(rest_at_the_end, "the quotient is rounded up, not down: the last ranks keep fewer, not more"),
        mutant(
            {"max(0, min(most, rows - rank * most))": "most"},
            "these are the rows with padding; asked for are a rank's own",
            name="with padding",
        ),
        mutant(
            {"max(0, min(most, rows - rank * most))": "min(most, rows - rank * most)"},
            "no rank keeps fewer rows than none: where nothing is left, say 0",
            name="below zero",
        ),
        Wrong(rounded_down, "the quotient is rounded down, so the last rows are on no rank"),
        mutant(
            {"range(ranks)": "range(ranks) if rank * most < rows"},
            "a rank that keeps nothing is a rank too: its shard is empty, and it takes part",
            name="only pieces",
        ),
    ),
    shortcuts=(Wrong(lambda rows, ranks: [2, 2, 1, 0], "expected"),),
    covers=("coverage 004.83", "coverage 004.84", "coverage 004.96"),
)
