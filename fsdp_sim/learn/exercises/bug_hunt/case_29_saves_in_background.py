"""A checkpoint in the background that ends the training, on some days."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong
from fsdp_sim.learn.judges import Inputs, OnRanks
from fsdp_sim.learn.verdict import Finding, Grade

RANKS, NUMBERS = 2, 60_000
EARLY, SHARD = 2, 0  # places among the arguments


stub = Edit(
    {
        "group = dist.new_group()  # of the checkpoint's own; all ranks make it, before any thread starts": "",
        "group=group, ": "",
        "save() if early else None": (
            "save() if early else None  # the thread that saves got its turn before the step"
        ),
        "work or save()": "work or save()  # or after it",
    }
)


def case_29(shard, gradient, early):
    ranks = dist.get_world_size()
    saved = torch.empty(ranks * len(shard))
    group = dist.new_group()  # of the checkpoint's own; all ranks make it, before any thread starts

    def save():
        return dist.all_gather_into_tensor(saved, shard, group=group, async_op=True)

    work = save() if early else None
    dist.all_reduce(gradient)
    work = work or save()
    work.wait()
    return {"saved": saved, "gradient": gradient / ranks}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    first = int(torch.randint(RANKS, (1,), generator=draw))
    rows = torch.randn(2, RANKS, NUMBERS, generator=draw)
    return [(rows[0, rank], rows[1, rank], rank == first) for rank in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[dict[str, torch.Tensor]]:
    saved = torch.cat([shard for shard, _, _ in inputs])
    gradient = torch.stack([gradient for _, gradient, _ in inputs]).mean(0)
    return [{"saved": saved, "gradient": gradient}] * RANKS


@dataclass(frozen=True)
class AsTheThreadsRan:
    """On the ranks whose thread came early the all-gather is issued before the all-reduce, on the others after it."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, records in enumerate(ran.records):
            ops = [record.op for record in records if record.op in ("all_gather", "all_reduce")]
            early = trial.each[rank][0][EARLY]
            if len(ops) >= 2 and (ops.index("all_gather") < ops.index("all_reduce")) is not early:
                when = "before" if early else "after"
                return Finding(
                    Grade.NOT_YET,
                    f"rank {rank}: its thread got its turn {when} the step, and the all-gather was not issued then; "
                    "when a thread runs is not yours to choose.",
                )
        return Finding(Grade.OPTIMAL, "")


def always_first(shard, gradient, early):
    return stub(shard, gradient, True)


def with_a_barrier(shard, gradient, early):
    ranks = dist.get_world_size()
    saved = torch.empty(ranks * len(shard))
    if early:
        dist.barrier()
        dist.all_gather_into_tensor(saved, shard)
    dist.all_reduce(gradient)
    if not early:
        dist.barrier()
        dist.all_gather_into_tensor(saved, shard)
    return {"saved": saved, "gradient": gradient / ranks}


def group_of_the_early(shard, gradient, early):
    ranks = dist.get_world_size()
    saved = torch.empty(ranks * len(shard))
    if early:
        group = dist.new_group()
        work = dist.all_gather_into_tensor(saved, shard, group=group, async_op=True)
    dist.all_reduce(gradient)
    if not early:
        group = dist.new_group()
        work = dist.all_gather_into_tensor(saved, shard, group=group, async_op=True)
    work.wait()
    return {"saved": saved, "gradient": gradient / ranks}


def not_gathered(shard, gradient, early):
    dist.all_reduce(gradient)
    return {"saved": shard.repeat(dist.get_world_size()), "gradient": gradient / dist.get_world_size()}


EXERCISE = Exercise(
    title="Mend a checkpoint that stops the training",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=3,
    minutes=15,
    contract="A thread saves in the background while the step goes on. On some days the job runs, on others it hangs "
    "or dies in the first save. Each rank is given its shard, its gradient, and `early`: whether its thread happened "
    "to get its turn before the step's all-reduce or after it. That differs from rank to rank and is not yours to "
    "choose. Mend it: return the gathered shards and the mean gradient.",
    reference=case_29,
    stub=stub,
    why="Within a process group collectives are numbered, and the third of one rank meets the third of the others, "
    "whatever it is. Two threads that share a group number theirs as they come, on each rank in another order. A "
    "group of its own has a count of its own. So a checkpoint that runs beside training gets one, over gloo, made "
    "once and by all ranks. torch's async_save takes it as process_group; without it, it takes the one that training "
    "uses.",
    cause="two threads issue collectives on one process group",
    hints=(
        "In which order does each rank issue its two collectives? How does a rank know which one of another to meet?",
        "Order counts within a process group, and between two groups it does not.",
        "dist.new_group() is itself called by all ranks; pass what it returns as group= to the all-gather.",
    ),
    judge=OnRanks(inputs=inputs, truth=in_one_process, checks=(AsTheThreadsRan(),)),
    wrong=(
        Wrong(always_first, "when a thread runs is not yours to choose"),
        Wrong(with_a_barrier, "#1 barrier on"),
        Wrong(group_of_the_early, "new_group"),
    ),
    shortcuts=(
        Wrong(not_gathered, "saved: expected"),
        Wrong(lambda shard, gradient, early: {"saved": shard, "gradient": gradient}, "saved: expected"),
    ),
    covers=("pitfall 10", "misconception 32"),
    stub_says="called a different collective",
)
