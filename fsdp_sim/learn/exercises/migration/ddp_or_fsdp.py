"""DDP or FSDP? Not by the number of parameters."""

from __future__ import annotations

import random
from functools import cache

from fsdp_sim import simulate
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Numbers
from fsdp_sim.spec import Cluster, Model, Plan

MODELS = ("gpt2-124m", "gpt2-350m", "gpt2-1.5b", "llama2-7b")
GPUS = ("A100-SXM-80GB", "RTX-4090")
SLACK = 1.05
BYTES = 16


def ddp_or_fsdp(model, gpu, gpus, micro_batch):
    seconds = {}
    for api in ("ddp", "fsdp2"):
        plan = Plan(api=api, micro_batch=micro_batch, param_dtype="bf16")
        sim = simulate(model, Cluster(gpu, gpus=gpus), plan)
        if sim.peak_memory_bytes <= sim.memory_limit_bytes:
            seconds[api] = sim.step_time_s
    if "ddp" in seconds and seconds["ddp"] <= 1.05 * seconds["fsdp2"]:
        return "ddp"
    return "fsdp2" if "fsdp2" in seconds else "neither"


@cache
def simulated(model: str, gpu: str, gpus: int, micro_batch: int) -> str:
    """The decision, from both simulations at once."""
    plans = [Plan(api=api, micro_batch=micro_batch, param_dtype="bf16") for api in ("ddp", "fsdp2")]
    ddp, fsdp2 = (simulate(model, Cluster(gpu, gpus=gpus), plan) for plan in plans)
    spare_bytes = [sim.memory_limit_bytes - sim.peak_memory_bytes for sim in (ddp, fsdp2)]
    close = ddp.step_time_s <= SLACK * fsdp2.step_time_s
    return "neither" if max(spare_bytes) < 0 else "ddp" if spare_bytes[0] >= 0 and close else "fsdp2"


def cases(draw: random.Random) -> list[tuple[str, str, int, int]]:
    """What the rules of thumb get wrong, and some drawn at random."""
    telling = [
        ("gpt2-350m", "RTX-4090", draw.choice((8, 32)), 15),  # with 16 what its allocator holds decides
        ("gpt2-1.5b", "RTX-4090", draw.choice((8, 32)), 1),
        ("gpt2-1.5b", "A100-SXM-80GB", draw.choice((2, 32)), 1),
        ("gpt2-1.5b", "A100-SXM-80GB", 8, 1),
        ("llama2-7b", "A100-SXM-80GB", draw.choice((2, 8)), 16),
    ]
    drawn = [(draw.choice(MODELS), draw.choice(GPUS), draw.choice((2, 8, 32)), draw.choice((1, 4))) for _ in range(3)]
    return [*telling, *drawn]


def by_size(model, gpu, gpus, micro_batch):
    return "fsdp2" if Model.preset(model).param_count > 1e9 else "ddp"


def by_states(model, gpu, gpus, micro_batch):
    states, memory = BYTES * Model.preset(model).param_count, Cluster(gpu, gpus=gpus).gpu.mem_bytes
    return "ddp" if states <= memory else "fsdp2" if states / gpus <= memory else "neither"


EXERCISE = Exercise(
    title="Decide between DDP and FSDP",
    kind=ExerciseKind.PLAN,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Given the names of a model and a GPU, the number of GPUs and the micro-batch, return 'ddp' if DDP fits "
    "and its step takes at most 5% longer than FSDP2's, else 'fsdp2' if that fits, else 'neither'. Use "
    "fsdp_sim.simulate with Plan(api=..., micro_batch=..., param_dtype='bf16'): a Simulation has peak_memory_bytes, "
    "memory_limit_bytes and step_time_s.",
    reference=ddp_or_fsdp,
    why="Whether it fits depends on states, activations and logits together, so on the micro-batch as much as on the "
    "model. What is faster depends on the wire: FSDP sends its parameters twice, but in bf16 and unit by unit, and "
    "each rank steps 1/N of AdamW; DDP sends gradients only, and every rank steps everything. A billion parameters is "
    "no border: the same model goes to DDP here and to FSDP there.",
    hints=(
        "Two questions in this order: what fits, and what is faster by enough to matter?",
        "Simulate both plans and compare peak_memory_bytes with memory_limit_bytes; then the step times.",
        "Keep the step times of those that fit in a dict, and go through the three answers in the order of the "
        "contract.",
    ),
    judge=Numbers(
        truth=simulated,
        source="simulated both ways",
        cases=cases,
        where="for {model} on {gpus} {gpu}, micro-batch {micro_batch}",
    ),
    wrong=(
        Wrong(by_size, "a billion parameters is no border: what counts is 16 bytes of each, activations, and the card"),
        Wrong(by_states, "states alone do not say whether it fits: activations and logits of the micro-batch do too"),
        mutant(
            {' and seconds["ddp"] <= 1.05 * seconds["fsdp2"]': ""},
            "DDP can fit and be slower: every rank steps all of AdamW",
            name="whenever it fits",
        ),
        mutant(
            {"if sim.peak_memory_bytes <= sim.memory_limit_bytes:\nseconds": "seconds"},
            "what does not fit has no step time",
            name="without memory",
        ),
        Wrong(lambda *case: "fsdp2", "FSDP is not always the answer, and sometimes nothing fits"),
    ),
    shortcuts=(Wrong(lambda model, *rest: {"gpt2-124m": "ddp"}.get(model, "neither"), "expected"),),
    covers=("coverage 000.24", "coverage 000.25", "misconception 0.27", "coverage 001.25"),
)
