"""How long a forward takes when the gathers hide, and when they cannot."""

from __future__ import annotations

import random

from fsdp_sim import engine
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import Instruction, Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op


def forward_time(layers, gather_s, compute_s):
    return gather_s + (layers - 1) * max(gather_s, compute_s) + compute_s


def replayed(layers: int, gather_s: float, compute_s: float) -> float:
    """By the simulator: torch's program with these durations, nothing else costs time."""
    units = [Unit("root", (), ("embed", ..., "head"))]
    units += [Unit(f"layers.{i}", (Param("weight", (8,)),)) for i in range(layers)]

    def seconds(i: Instruction) -> float:
        return {Op.ALL_GATHER: gather_s, Op.FWD: compute_s}.get(i.op, 0.0) if i.unit.startswith("layers") else 0.0

    timeline = engine.replay(build(units, Plan(), world_size=8), seconds)
    return max(event.end_s for event in timeline.ops if event.op is Op.FWD)


def cases(draw: random.Random) -> list[tuple[int, float, float]]:
    def case(slower: int, faster: int) -> tuple[int, float, float]:
        return draw.randint(3, 40), draw.randint(*sorted((slower, faster))) / 1e3, draw.randint(20, 40) / 1e3

    return [case(1, 19), case(1, 19), case(41, 90), case(41, 90)]


EXERCISE = Exercise(
    title="Predict a forward from two durations",
    kind=ExerciseKind.NUMBER,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Given the number of blocks, the seconds of one block's all-gather and of its forward, return the seconds "
    "from the first all-gather to the end of the last block's forward, with FSDP2's default on a GPU whose CPU runs "
    "ahead. One all-gather at a time; the root, copies and issuing take no time.",
    reference=forward_time,
    why="The first gather has nothing to hide behind, the last forward has nothing to hide. In between, a gather and a "
    "forward run side by side, and the longer of the two sets the pace: compute while a gather is shorter, else the "
    "wire. No order of issue does better, for either the wire or the compute stream never pauses.",
    hints=(
        "Draw two rows, wire and compute, for three blocks. What stands alone at the left end, what at the right?",
        "Between the two ends one of the rows has no gaps. Which one, if the gather is the longer?",
        "One gather, then layers - 1 times the longer of the two, then one forward.",
    ),
    judge=Numbers(
        truth=replayed,
        source="replayed from torch's program with these durations",
        cases=cases,
        where="for {layers} blocks, {gather_s} s a gather, {compute_s} s a forward",
        unit="s",
        rel=1e-6,
    ),
    wrong=(
        Wrong(
            lambda layers, gather_s, compute_s: layers * (gather_s + compute_s),
            "that is without overlap: each gather waits for the forward before it",
        ),
        Wrong(
            lambda layers, gather_s, compute_s: gather_s + layers * compute_s,
            "a gather that takes longer than a forward cannot hide behind it",
        ),
        Wrong(
            lambda layers, gather_s, compute_s: layers * max(gather_s, compute_s),
            "the first gather and the last forward have nothing beside them",
        ),
        Wrong(
            lambda layers, gather_s, compute_s: max(layers * gather_s, layers * compute_s) + compute_s,
            "what is alone at the start is a gather, and it is there only once",
        ),
    ),
    shortcuts=(Wrong(lambda layers, gather_s, compute_s: 0.1, "expected"),),
    covers=("coverage 002.18", "coverage 004.25", "misconception 4.30"),
)
