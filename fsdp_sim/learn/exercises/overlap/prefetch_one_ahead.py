"""Write a forward that gathers the next unit while this one computes."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import ExposedTime, Inputs, OnlyCollectives, OnRanks, PeakBytes
from fsdp_sim.ranks import Network
from fsdp_sim.timeline import RECORDER, Op

RANKS, UNITS, WIDTH = 2, 6, 320
COMPUTE_S, GATHER_S = 0.04, 0.03
UNIT_BYTES = WIDTH * WIDTH * 4
NETWORK = Network(bandwidth_gbps=8 * UNIT_BYTES / RANKS / GATHER_S / 1e9)


def compute(unit: int, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One unit's forward; the timeline shows it as FWD."""
    with RECORDER.span(Op.FWD, f"layers.{unit}"):
        return torch.tanh(weight @ x)


def prefetch_one_ahead(shards, x, compute):
    def gather(shard):
        whole = torch.empty(shard.shape[0] * dist.get_world_size(), shard.shape[1])
        return whole, dist.all_gather_into_tensor(whole, shard, async_op=True)

    following = gather(shards[0])
    for unit in range(len(shards)):
        (whole, work), following = following, None
        work.wait()
        if unit + 1 < len(shards):
            following = gather(shards[unit + 1])
        x = compute(unit, whole, x)
    return x


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(UNITS, WIDTH // RANKS, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(RANKS)]
    return [(list(mine.unbind()), torch.randn(WIDTH, generator=draw), compute) for mine in rows]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    wholes = [torch.cat([shards[unit] for shards, _, _ in inputs]) for unit in range(UNITS)]
    return [functools.reduce(lambda x, whole: torch.tanh(whole @ x), wholes, x) for _, x, _ in inputs]


def least_bytes(trial: Trial) -> int:
    return UNITS * UNIT_BYTES // RANKS + 2 * UNIT_BYTES


def one_after_the_other(shards, x, compute):
    for unit, shard in enumerate(shards):
        whole = torch.empty(shard.shape[0] * RANKS, shard.shape[1])
        dist.all_gather_into_tensor(whole, shard)
        x = compute(unit, whole, x)
    return x


def never_waits(shards, x, compute):
    for unit, shard in enumerate(shards):
        whole = torch.zeros(shard.shape[0] * RANKS, shard.shape[1])
        work = dist.all_gather_into_tensor(whole, shard, async_op=True)
        x = compute(unit, whole.clone() * 0, x)
        work.wait()
    return x


def does_not_compute(shards, x, compute):
    for shard in shards:
        whole = torch.empty(shard.shape[0] * RANKS, shard.shape[1])
        dist.all_gather_into_tensor(whole, shard)
        x = torch.tanh(whole @ x)
    return x


def shards_only(shards, x, compute):
    for unit, shard in enumerate(shards):
        x = compute(unit, torch.cat([shard] * RANKS), x)
    return x


EXERCISE = Exercise(
    title="Gather the next unit while this one computes",
    kind=ExerciseKind.CODE,
    difficulty=4,
    importance=5,
    minutes=35,
    contract="Every rank has its rows of each unit's weight (a list of tensors) and its own x. For each unit in turn, "
    "gather the whole weight and call compute(unit, weight, x), which returns the next x; return the last one. On "
    "the network meant here an all-gather takes 30 ms, a unit's compute 40 ms. Keep at most two units whole at a time.",
    targets="Optimal: only the first all-gather is exposed, and never more than two units are whole.",
    reference=prefetch_one_ahead,
    why="An all-gather that is waited for at once is exposed. Issued one unit ahead, with async_op=True, it runs while "
    "the unit before computes, and nothing but the first is exposed. Issue them all at the start, and time is the "
    "same, but every unit is whole at once, and the memory that sharding has saved is gone.",
    hints=(
        "Who waits for whom? Compute needs its own weight, not the next one's.",
        "Issue the next unit's all-gather with async_op=True after waiting for this one's, before you compute.",
        "Keep (whole, work) of the following unit in a variable; each turn: take it, wait, issue the next, compute.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(
            OnlyCollectives(frozenset({"all_gather"}), "all-gathers are all it takes"),
            ExposedTime(
                NETWORK,
                COMPUTE_S,
                least=1,
                good=2,
                passes=3,
                cure="issue the next all-gather before you compute, and wait for it after",
            ),
            PeakBytes(
                least_bytes,
                proof="its shards, the unit that computes and the one that arrives",
                good=1.1,
                passes=1.3,
                cure="let go of a whole weight when its unit has computed, and gather one ahead, not all",
            ),
        ),
        metered=True,
        abs_=1e-4,
    ),
    wrong=(
        Wrong(one_after_the_other, "after FWD layers.0 a collective was issued and waited for at once"),
        mutant(
            {
                "return whole, dist.all_gather_into_tensor(whole, shard, async_op=True)": (
                    "dist.all_gather_into_tensor(whole, shard)\nreturn whole, None"
                ),
                "work.wait()": "",
            },
            "collectives' time exposed",
            name="waits at once",
        ),
        mutant(
            {
                "following = gather(shards[0])": "gathered = [gather(shard) for shard in shards]",
                "(whole, work), following = following, None": "whole, work = gathered[unit]",
                "if unit + 1 < len(shards):\nfollowing = gather(shards[unit + 1])": "",
            },
            "gather one ahead, not all",
            name="everything first",
        ),
        Wrong(never_waits, "numbers differ"),
        Wrong(shards_only, "numbers differ"),
    ),
    shortcuts=(
        Wrong(lambda shards, x, compute: torch.zeros(WIDTH), "all of it is zero"),
        Wrong(does_not_compute, "expected at most"),
    ),
    covers=("coverage 000.21", "coverage 002.18", "coverage 002.23", "misconception 17"),
)
