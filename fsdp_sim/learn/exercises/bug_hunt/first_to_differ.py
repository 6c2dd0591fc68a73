"""Read what the ranks have issued: where do they part, and who is off?"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import toy_program
from fsdp_sim.timeline import COLLECTIVES

RANKS = 4


def first_to_differ(issued):
    for place in range(max(map(len, issued))):
        here = [labels[place] if place < len(labels) else "nothing" for labels in issued]
        usual = max(set(here), key=here.count)
        if any(label != usual for label in here):
            return {"number": place + 1, "ranks": [rank for rank, label in enumerate(here) if label != usual]}
    return None


def found(issued: list[list[str]]) -> dict[str, Any]:
    """Where the columns of the record first hold two labels, and who has the rarer one."""
    columns = enumerate(itertools.zip_longest(*issued), start=1)
    number, column = next((number, column) for number, column in columns if len(set(column)) > 1)
    (usual, _), *_ = Counter(column).most_common()
    return {"number": number, "ranks": [rank for rank, label in enumerate(column) if label != usual]}


def cases(draw: random.Random) -> list[tuple[list[list[str]]]]:
    """One rank stops early, leaves one out, or issues two in another order; all of them end where they hang."""
    labels = [f"{i.op}({i.unit})" for i in toy_program(4, world_size=RANKS).ops if i.op in COLLECTIVES]
    made: list[tuple[list[list[str]]]] = []
    for spoil in (_stops, _leaves_out, _swaps, _leaves_out):
        odd = 0 if len(made) == 1 else draw.randrange(RANKS)
        place = draw.choice([p for p in range(3, len(labels) - 3) if labels[p] != labels[p + 1]])
        issued = [labels[: place + 1] for _ in range(RANKS)]
        issued[odd] = spoil(labels, place)
        made.append((issued,))
    return made


def _stops(labels: list[str], place: int) -> list[str]:
    return labels[:place]


def _leaves_out(labels: list[str], place: int) -> list[str]:
    return [*labels[:place], labels[place + 1]]


def _swaps(labels: list[str], place: int) -> list[str]:
    return [*labels[:place], labels[place + 1], labels[place]]


def where_the_shortest_ends(issued):
    least = min(map(len, issued))
    return {"number": least + 1, "ranks": [rank for rank, labels in enumerate(issued) if len(labels) == least]}


EXERCISE = Exercise(
    title="Read who is off, and where",
    kind=ExerciseKind.TRACE,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="A job hangs, and this is known: for each rank the collectives that it has issued, in order, as labels "
    "such as 'ALL_GATHER(layers.1)'; the last is the one it waits in. One rank is off: it has stopped, left one out, "
    "or issued two in another order. Return {'number': the first at which not all ranks are alike, counted from 1, "
    "'ranks': [the rank that is off]}.",
    reference=first_to_differ,
    why="Where ranks wait is seldom where they parted: a collective that was left out is met by the next of the same "
    "kind, and the hang comes later. So read from the beginning, all ranks side by side, to the first line that is "
    "not the same; most ranks are right, and rank 0 is not always one of them. That is what a flight recorder is for, "
    "and what `python -m labs.cluster.flight_recorder` does with its dumps.",
    hints=(
        "Lay the lists side by side. Is the last line of each the interesting one?",
        "Go through the places from the first on. At each, what do most ranks have, and who has something else?",
        "A list that has ended has 'nothing' at this place; compare with the label that occurs most often.",
    ),
    judge=Numbers(truth=found, source="found by comparing the records of all ranks", cases=cases),
    wrong=(
        mutant(
            {"max(set(here), key=here.count)": "here[0]"},
            "you took rank 0 to be right; it may be the one that is off: most ranks are right",
            name="against rank 0",
        ),
        mutant({"place + 1": "place"}, "count from 1, as the ranks' reports do", name="counted from 0"),
        mutant(
            {"label != usual]": "label == usual]"},
            "those ranks wait; asked for is the one that they wait for",
            name="who waits",
        ),
        Wrong(where_the_shortest_ends, "where a list ends is where its rank waits; they may have parted before"),
        mutant(
            {"place + 1": "max(map(len, issued))"},
            "that is where they hang; asked for is where they part",
            name="the last one",
        ),
    ),
    shortcuts=(Wrong(lambda issued: {"number": 5, "ranks": [1]}, "expected"),),
    covers=("pitfall 6", "pitfall 8", "misconception 35"),
)
