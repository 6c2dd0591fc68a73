"""DDP, ZeRO 1, 2 and 3: what one rank keeps of a model's states."""

from __future__ import annotations

import functools
import random

from fsdp_sim import simulate
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Memory, Op

WAYS = ("ddp", "zero1", "zero2", "fsdp")
MODELS = {Model.preset(name).param_count: name for name in ("gpt2-124m", "gpt2-350m", "bert-base", "bert-large")}
STATES = (Memory.SHARDED, Memory.OPTIMIZER, Memory.RS_OUTPUT, Memory.UNSHARDED_GRAD)


def state_bytes_of_a_rank(params, ranks, how):
    parameters, gradients, moments = 4 * params, 4 * params, 8 * params
    if how in ("zero1", "zero2", "fsdp"):
        moments /= ranks
    if how in ("zero2", "fsdp"):
        gradients /= ranks
    if how == "fsdp":
        parameters /= ranks
    return parameters + gradients + moments


@functools.cache
def kept_at_the_step(params: int, ranks: int, how: str) -> int:
    """Of a published model with that many parameters: what is alive when the optimizer begins, simulated."""
    plan = Plan(api="fsdp2" if how == "fsdp" else how, seq_len=64)  # type: ignore[arg-type]
    events = simulate(MODELS[params], Cluster("A100-SXM-80GB", gpus=ranks), plan).timeline.events
    until = next(place for place, event in enumerate(events) if event.op is Op.OPTIM)
    signs = {Op.ALLOC: 1, Op.FREE: -1}
    return sum(signs.get(e.op, 0) * e.bytes for e in events[:until] if e.category in STATES)


def cases(draw: random.Random) -> list[tuple[int, int, str]]:
    return [(draw.choice(list(MODELS)), ranks, how) for how in WAYS for ranks in draw.sample((2, 4, 8, 64), 2)]


EXERCISE = Exercise(
    title="Divide the states as ZeRO does, stage by stage",
    kind=ExerciseKind.NUMBER,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Given the number of parameters, the number of ranks, and how they train ('ddp'; 'zero1', 'zero2'; "
    "'fsdp', which is ZeRO-3), return the bytes of parameters, gradients and AdamW moments that one rank keeps from "
    "step to step. Everything is fp32; activations and units that are whole for a while do not count here.",
    reference=state_bytes_of_a_rank,
    why="Each stage divides one thing more: 1 the moments, 2 the gradients too, 3 the parameters too. The largest "
    "part, the moments, goes first, and costs no communication beyond DDP's; only the last stage does. With many "
    "ranks ZeRO-1 tends to 8 bytes per parameter, ZeRO-2 to 4, and FSDP to nothing. So on states alone it is FSDP "
    "that has no limit.",
    hints=(
        "Which of the three kinds of states does a rank need whole between two steps, and which only in part?",
        "Stage 1 shards what only the optimizer reads; stage 2 also what it reads once; stage 3 everything.",
        "Begin with 4 + 4 + 8 bytes per parameter, and divide the last, then the second, then the first by ranks.",
    ),
    judge=Numbers(
        truth=kept_at_the_step,
        source="found alive when the optimizer of a simulated step begins",
        cases=cases,
        where="for {params:,} parameters, {ranks} ranks and {how}",
        unit="bytes",
        rel=1e-3,  # rows that the ranks do not divide are padded
    ),
    wrong=(
        Wrong(
            lambda params, ranks, how: 16 * params * (ranks if how == "ddp" else 1 / ranks),
            "a rank of DDP keeps one copy; times the ranks is the sum over all of them",
        ),
        mutant(
            {'in ("zero2", "fsdp")': '!= "ddp"', 'how == "fsdp"': 'how != "ddp"'},
            "only stage 3 divides everything; stage 1 divides the moments alone",
        ),
        mutant(
            {'("zero1", "zero2", "fsdp")': '("zero2", "fsdp")', 'how in ("zero2", "fsdp")': 'how != "ddp"'},
            "stage 1 divides the optimizer's state, not the gradients",
        ),
        mutant({'how in ("zero2", "fsdp")': 'how == "fsdp"'}, "stage 2 divides the gradients too, as its only news"),
        mutant({"parameters /= ranks": "pass"}, "FSDP divides the parameters too: that is stage 3"),
        Wrong(
            lambda params, ranks, how: state_bytes_of_a_rank(params, ranks, how) / 2,
            "AdamW keeps two moments of 4 bytes, and parameters and gradients are fp32: 16 bytes before division",
        ),
    ),
    shortcuts=(Wrong(lambda params, ranks, how: 16 * params / ranks, "expected"),),
    covers=("coverage 003.1", "coverage 003.3", "coverage 003.9", "coverage 001.1", "coverage 004.18"),
)
