"""gloo shows what FSDP's communication costs: true or false?"""

from __future__ import annotations

from typing import Any

import psutil
import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks
from fsdp_sim.learn.judges.account import GLOO, RINGS
from fsdp_sim.learn.verdict import Finding, Grade

RANKS = 4


def reduce_scatter_over_gloo(whole):
    process, own = psutil.Process(), torch.empty(len(whole) // dist.get_world_size())

    def bytes_of(collective):
        before = process.io_counters().write_chars
        collective()
        return process.io_counters().write_chars - before

    gather = bytes_of(lambda: dist.all_gather_into_tensor(whole.clone(), own))
    reduce = bytes_of(lambda: dist.reduce_scatter_tensor(own, whole))
    return {"all_gather": gather, "reduce_scatter": reduce, "the same": abs(reduce / gather - 1) < 0.1}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    numbers = RANKS * int(torch.randint(100_000, 200_000, (1,), generator=draw))
    return [(torch.randn(numbers, generator=draw),) for _ in range(RANKS)]


def sent(inputs: Inputs, times: dict[str, int], same: bool) -> list[dict[str, Any]]:
    """By rank, for a library whose collectives send so many times (W-1)/W of the message."""
    share_bytes = (RANKS - 1) / RANKS * len(inputs[0][0]) * 4
    ops = ("all_gather", "reduce_scatter")
    return [{op: times[op] * share_bytes for op in ops} | {"the same": same}] * RANKS


def whole_messages(inputs: Inputs) -> list[dict[str, Any]]:
    n_bytes = len(inputs[0][0]) * 4
    return [{"all_gather": n_bytes, "reduce_scatter": n_bytes, "the same": True}] * RANKS


class OneOfEach:
    """The account shows one of each collective."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, records in enumerate(ran.records):
            missing = {"all_gather", "reduce_scatter"} - {record.op for record in records}
            if missing:
                what = f"rank {rank}: expected one {min(missing)} at least, found none"
                return Finding(Grade.NOT_YET, f"{what}; count what leaves the process while it runs.")
        return Finding(Grade.OPTIMAL, "")


def as_a_ring(whole):
    ranks = dist.get_world_size()
    n_bytes = (ranks - 1) / ranks * len(whole) * 4
    return {"all_gather": n_bytes, "reduce_scatter": n_bytes, "the same": True}


def message(whole):
    return {"all_gather": len(whole) * 4, "reduce_scatter": len(whole) * 4, "the same": True}


def known(whole):
    ranks = dist.get_world_size()
    n_bytes = (ranks - 1) / ranks * len(whole) * 4
    return {"all_gather": n_bytes, "reduce_scatter": 2 * n_bytes, "the same": False}


EXERCISE = Exercise(
    title="Settle whether gloo reduce-scatters as cheaply as it gathers",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=15,
    contract="\"On gloo one sees what FSDP's communication costs: a reduce-scatter sends as many bytes as an "
    'all-gather." Given a tensor whose length divides by the ranks, all-gather one of this size and reduce-scatter '
    "this one, and count the bytes that leave this process meanwhile: psutil.Process().io_counters().write_chars. "
    "Return a dict: all_gather and reduce_scatter, in bytes, and 'the same', True or False.",
    reference=reduce_scatter_over_gloo,
    why="Twice as many: gloo has no reduce-scatter of its own. Torch runs an all-reduce and drops what belongs to "
    "other ranks, so on gloo FSDP sends 4 where NCCL sends 3. And streams do nothing on a CPU. What carries over from "
    "here to GPUs is which collectives run, in which order, and of how many elements; bytes on the wire and times do "
    "not.",
    hints=(
        "The kernel counts what a process writes to sockets; the difference before and after is what left.",
        "An all-gather has a shard as input and the whole as output; a reduce-scatter the other way round.",
        "Read write_chars, run all_gather_into_tensor, read it again; the same with reduce_scatter_tensor.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=lambda inputs: sent(inputs, GLOO, same=False),
        causes=(
            (
                lambda inputs: sent(inputs, RINGS, same=True),
                "this is what a ring sends, by the formula; count what leaves the process",
            ),
            (whole_messages, "this is the size of the message; count what leaves the process"),
            (
                lambda inputs: [t | {"the same": True} for t in sent(inputs, GLOO, same=False)],
                "your bytes say the contrary: one is twice the other",
            ),
        ),
        checks=(OneOfEach(),),
        rel=0.05,
    ),
    wrong=(
        Wrong(as_a_ring, "this is what a ring sends, by the formula"),
        Wrong(message, "this is the size of the message"),
        mutant({"abs(reduce / gather - 1) < 0.1": "True"}, "one is twice the other", name="other conclusion"),
        mutant(
            {
                '"all_gather": gather, "reduce_scatter": reduce': (
                    '"all_gather": gather / 4, "reduce_scatter": reduce / 4'
                )
            },
            "all_gather: expected",
            name="in elements",
        ),
    ),
    shortcuts=(
        Wrong(known, "count what leaves the process while it runs"),
        Wrong(lambda whole: {"all_gather": 1, "reduce_scatter": 2, "the same": False}, "expected"),
    ),
    covers=("misconception 33",),
)
