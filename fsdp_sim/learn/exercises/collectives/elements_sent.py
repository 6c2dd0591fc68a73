"""2 psi or 3 psi? What one rank sends in a step."""

from __future__ import annotations

import random
from collections.abc import Callable

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import Param, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

UNITS = 5
PLANS = {
    "ddp": Plan(api="ddp"),
    "zero2": Plan(api="zero2"),
    "fsdp": Plan(reshard_after_forward=True),
    "fsdp kept": Plan(reshard_after_forward=False),
}
TIMES = {Op.ALL_REDUCE: 2, Op.ALL_GATHER: 1, Op.REDUCE_SCATTER: 1}  # (W-1)/W of the message that a rank of a ring sends


def elements_sent(params, ranks, how):
    share = (ranks - 1) / ranks  # what a rank of a ring sends for one all-gather or one reduce-scatter
    passes = {"ddp": 2, "zero2": 2, "fsdp": 3, "fsdp kept": 2}[how]
    return passes * share * params


def counted(params: int, ranks: int, how: str) -> float:
    """Over the collectives of a built program."""
    root, *layers = (Param("weight", (params // UNITS,)) for _ in range(UNITS))
    units = [Unit("root", (root,), ("embed", ...))]
    units += [Unit(f"layers.{i}", (layer,)) for i, layer in enumerate(layers)]
    program = build(units, PLANS[how], ranks)
    return sum(TIMES.get(i.op, 0) * (ranks - 1) / ranks * i.bytes / 4 for i in program.ops)


def cases(draw: random.Random) -> list[tuple[int, int, str]]:
    return [(UNITS * 1024 * ranks * draw.randint(1, 99), ranks, how) for how in PLANS for ranks in (2, 8)]


def passes_of(ddp: float, zero2: float, fsdp: float, kept: float, ring: bool = True) -> Callable[..., float]:
    """An answer with other factors."""
    passes = dict(zip(PLANS, (ddp, zero2, fsdp, kept), strict=True))
    return lambda params, ranks, how: passes[how] * params * ((ranks - 1) / ranks if ring else 1)


EXERCISE = Exercise(
    title="Count what a rank sends in one step",
    kind=ExerciseKind.NUMBER,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Given the number of parameters, the number of ranks, and how they train ('ddp'; 'zero2'; 'fsdp', which "
    "frees parameters after forward; 'fsdp kept', which does not), return how many elements one rank sends in a step "
    "with ring collectives. One micro-batch; every unit is treated alike, the root too.",
    reference=elements_sent,
    why="A ring all-gather or reduce-scatter makes each rank send (W-1)/W of the message; an all-reduce is one of "
    "each. DDP all-reduces the gradients: 2. ZeRO-2 reduce-scatters gradients and gathers parameters once: 2. FSDP "
    "gathers in forward and again in backward, and reduce-scatters: 3, half as much again. Keep the parameters, and it "
    "is 2.",
    hints=(
        "An all-reduce is a reduce-scatter and then an all-gather.",
        "A rank of a ring sends (W-1)/W of the whole message for one of these two. How often does each plan do one?",
        "The factor before (ranks - 1) / ranks * params is 2 or 3; only one plan gathers twice.",
    ),
    judge=Numbers(
        truth=counted,
        source="counted over the collectives of the built program",
        cases=cases,
        where="for {params:,} parameters, {ranks} ranks and {how}",
        unit="elements",
    ),
    wrong=(
        Wrong(passes_of(2, 2, 2, 2), "you forgot the backward all-gather: what was freed after forward comes again"),
        Wrong(passes_of(2, 2, 3, 3), "parameters that are kept after forward are not gathered again in backward"),
        Wrong(passes_of(2, 3, 3, 2), "ZeRO-2 keeps its parameters whole, and gathers them once, when they are new"),
        Wrong(passes_of(1, 2, 3, 2), "an all-reduce is a reduce-scatter and an all-gather: it counts twice"),
        Wrong(passes_of(2, 2, 4, 3), "a reduce-scatter is half of an all-reduce: it counts once"),
        Wrong(
            passes_of(2, 2, 3, 2, ring=False), "a rank does not send its own share to itself: (W-1)/W of the message"
        ),
    ),
    shortcuts=(Wrong(lambda params, ranks, how: 3 * params // 2, "expected"),),
    covers=("coverage 000.33", "misconception 13", "misconception 14"),
)
