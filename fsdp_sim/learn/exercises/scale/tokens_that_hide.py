"""How many tokens does a GPU need for the network to keep up?"""

from __future__ import annotations

import functools
import random

from fsdp_sim import engine
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.schedule import Param, Program, Unit, build
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op

LAYERS, PARAMS = 12, 1e9
AT_THE_ENDS = 2.0  # collectives that nothing can hide: the first all-gather and the last reduce-scatter


def tokens_that_hide(flops_per_s, bytes_per_s, ranks):
    # forward of P parameters: 2 P tokens / flops_per_s; its gather in bf16: 2 P (W-1)/W / bytes_per_s
    return (ranks - 1) / ranks * flops_per_s / bytes_per_s


@functools.cache
def program() -> Program:
    """A step of equal blocks under a root without parameters, as torch's FSDP2 issues it."""
    blocks = (Unit(f"layers.{i}", (Param("weight", (64, 4)),)) for i in range(LAYERS))
    return build([Unit("root", segments=(...,)), *blocks], Plan(reshard_after_forward=True), 8)


def played(flops_per_s: float, bytes_per_s: float, ranks: int) -> float:
    """The fewest tokens with which the engine leaves nothing exposed but the two ends, by bisection."""
    comm_s = 2 * PARAMS * (ranks - 1) / ranks / bytes_per_s

    def hides(tokens: float) -> bool:
        forward_s = 2 * PARAMS * tokens / flops_per_s
        seconds = {Op.FWD: forward_s, Op.BWD: 2 * forward_s, Op.ALL_GATHER: comm_s, Op.REDUCE_SCATTER: comm_s}
        run = engine.run(program(), lambda i: seconds.get(i.op, 0.0))
        return engine.exposure(run).exposed_s <= (AT_THE_ENDS + 1e-6) * comm_s

    low, high = 0.0, 1e9
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if hides(middle) else (middle, high)
    return high


def cases(draw: random.Random) -> list[tuple[float, float, int]]:
    return [(draw.uniform(100, 900) * 1e12, draw.uniform(2, 60) * 1e9, ranks) for ranks in (2, 8, 64)]


EXERCISE = Exercise(
    title="Find how many tokens hide the network",
    kind=ExerciseKind.NUMBER,
    difficulty=3,
    importance=5,
    minutes=20,
    contract="Given what a GPU computes (flops_per_s, as reached), what it sends over the slowest link of a ring "
    "(bytes_per_s) and the ranks, return the fewest tokens per GPU and micro-batch with which FSDP2 (freed after "
    "forward) exposes nothing but the first gather and the last reduction. Parameters and gradients travel in bf16; a "
    "block with P parameters takes 2 P FLOPs per token forward and 4 P backward; copies and latencies take no time.",
    reference=tokens_that_hide,
    why="While one block computes, 2 P T / F seconds, the next one's gather must arrive: 2 P (W-1)/W / B. P falls "
    "out: the threshold is F / B tokens, whatever the size of the model. Backward computes twice as long and moves "
    "twice as much (a gather and a reduction on one communicator): the same threshold. Above it more bandwidth buys "
    "nothing, below it nothing else helps.",
    hints=(
        "Two times are compared: one block's compute, and what must arrive meanwhile. Which one grows with tokens?",
        "Write both for a block of P parameters: FLOPs over flops_per_s, bytes over bytes_per_s. What becomes of P?",
        "2 P T / flops_per_s = 2 P (W-1)/W / bytes_per_s; solve for T, and see that backward gives the same.",
    ),
    judge=Numbers(
        truth=played,
        source="found by playing FSDP2's program with these durations",
        cases=cases,
        where="for {flops_per_s:.3g} FLOP/s, {bytes_per_s:.3g} bytes/s and {ranks} ranks",
        unit="tokens",
        rel=1e-3,
    ),
    wrong=(
        mutant({"return": "return 2 *"}, "that is for fp32: parameters travel in bf16, 2 bytes each"),
        mutant(
            {"return": "return 0.5 *"},
            "you counted an addition and a multiplication as one, or a parameter as one byte",
        ),
        mutant(
            {"return": "return 1.5 *"},
            "backward moves twice as much and computes twice as long: forward's threshold holds for it",
        ),
        Wrong(
            lambda flops_per_s, bytes_per_s, ranks: flops_per_s / bytes_per_s,
            "a rank has its own share already: (W-1)/W of the block must arrive",
        ),
    ),
    shortcuts=(Wrong(lambda flops_per_s, bytes_per_s, ranks: 4096, "expected"),),
    covers=("coverage 001.53",),
)
