"""What BACKWARD_PRE, BACKWARD_POST and None hold in memory."""

from __future__ import annotations

import itertools
import random

from fsdp_sim import engine
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Memory, Phase

MODES = ("BACKWARD_PRE", "BACKWARD_POST", None)


def whole_in_backward(unit_bytes, prefetch):
    if prefetch == "BACKWARD_PRE":
        return max(one + following for one, following in itertools.pairwise(unit_bytes))
    return max(unit_bytes)


def counted(unit_bytes: list[int], prefetch: str | None) -> int:
    """Over the allocations and frees in the program that torch's FSDP1 issues."""
    units = [Unit("root", (), ("embed", ..., "head"))]
    units += [Unit(f"layers.{i}", (Param("weight", (n // 4,)),)) for i, n in enumerate(unit_bytes)]
    program = build(units, Plan(api="fsdp1", backward_prefetch=prefetch or "none"), world_size=4)
    return engine.memory(program).peak_of([Memory.UNSHARDED], Phase.BACKWARD)


def cases(draw: random.Random) -> list[tuple[list[int], str | None]]:
    return [(sizes(draw), mode) for mode in MODES for _ in range(2)]


def sizes(draw: random.Random) -> list[int]:
    """Of six blocks; the two largest are no neighbours."""
    blocks = draw.sample(range(10, 99), 6)
    second, first = (blocks.index(n) for n in sorted(blocks)[-2:])
    return sizes(draw) if abs(first - second) == 1 else [16_000 * n for n in blocks]


EXERCISE = Exercise(
    title="Predict what each backward prefetch holds",
    kind=ExerciseKind.NUMBER,
    difficulty=2,
    importance=4,
    minutes=10,
    contract="FSDP1 with blocks of different sizes: unit_bytes lists the bytes of each block's whole parameters, in "
    "forward's order (the root has none). Given prefetch ('BACKWARD_PRE', 'BACKWARD_POST' or None), return the most "
    "bytes of whole parameters that are allocated at one moment of backward.",
    reference=whole_in_backward,
    why="PRE asks for the next unit while this one is still needed, so two neighbours are whole at once, and the worst "
    "pair of neighbours decides. POST asks when this one has been freed, and None asks even later: one at a time, so "
    "the largest decides. POST costs no more memory than None, and there is no such thing as one and a half units.",
    hints=(
        "Which units are whole in the moment when one is asked for? Is the one before it freed by then?",
        "PRE allocates the next before the current computes; POST frees the current, then allocates the next.",
        "For PRE the largest sum of two neighbours, otherwise the largest.",
    ),
    judge=Numbers(
        truth=counted,
        source="counted over the program that torch issues",
        cases=cases,
        where="for {prefetch}",
        unit="bytes",
    ),
    wrong=(
        mutant(
            {"max(unit_bytes)": 'max(unit_bytes) * (1.5 if prefetch == "BACKWARD_POST" else 1)'},
            "there are no half units: POST frees a unit before it asks for the next",
            name="half a unit",
        ),
        mutant(
            {
                "max(one + following for one, following in itertools.pairwise(unit_bytes))": (
                    "max(map(sum, zip(unit_bytes, unit_bytes[1:], unit_bytes[2:])))"
                )
            },
            "PRE looks one unit ahead, so two are whole at a time, not three",
            name="three at a time",
        ),
        mutant(
            {
                "max(one + following for one, following in itertools.pairwise(unit_bytes))": (
                    "sum(sorted(unit_bytes)[-2:])"
                )
            },
            "the two largest are not neighbours: a unit is whole together with the next in backward",
            name="two largest",
        ),
        mutant(
            {'prefetch == "BACKWARD_PRE"': "prefetch"},
            "POST asks for the next unit after this one was freed, so only one is whole",
            name="post holds two",
        ),
    ),
    shortcuts=(Wrong(lambda unit_bytes, prefetch: sum(unit_bytes) // 3, "expected"),),
    covers=("coverage 002.24", "coverage 002.26", "misconception 2.26", "misconception 2.27"),
)
