"""A loss that is wrong now and then."""

from __future__ import annotations

import functools
import time  # noqa: F401 - in edits
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.inside import WAIT
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks
from fsdp_sim.learn.verdict import Finding, Grade
from fsdp_sim.timeline import COLLECTIVES, RECORDER, Op

RANKS, UNITS, WIDTH = 2, 4, 256


def compute(unit: int, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One unit's forward; the timeline shows it as FWD."""
    with RECORDER.span(Op.FWD, f"layers.{unit}"):
        return torch.tanh(weight @ x)


stub = Edit(
    {
        "work.wait()  # only then may anyone read it": "",
        "x = compute(unit, weight, x)": "x = compute(unit, weight, x)\nwork.wait()",
    }
)


def case_36(shards, x, compute):
    for unit, shard in enumerate(shards):
        weight = torch.empty(len(shard) * dist.get_world_size(), shard.shape[1])
        work = dist.all_gather_into_tensor(weight, shard, async_op=True)
        work.wait()  # only then may anyone read it
        x = compute(unit, weight, x)
    return x


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randn(UNITS, WIDTH // RANKS, WIDTH, generator=draw) / WIDTH**0.5 for _ in range(RANKS)]
    return [(list(mine.unbind()), torch.randn(WIDTH, generator=draw), compute) for mine in rows]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    wholes = [torch.cat([shards[unit] for shards, _, _ in inputs]) for unit in range(UNITS)]
    return [functools.reduce(lambda x, whole: torch.tanh(whole @ x), wholes, x) for _, x, _ in inputs]


@dataclass(frozen=True)
class WaitsFirst:
    """The n-th forward begins after n waits for all-gathers, or after all there are, in a rank's own order."""

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank in range(trial.ranks):
            events = [event for event in ran.timeline.ops if event.rank == rank]
            others = {event.seq for event in events if event.op in COLLECTIVES and event.op is not Op.ALL_GATHER}
            gathers = sum(record.op == "all_gather" for record in ran.records[rank])
            forwards, waited = [], set[int]()
            for event in events:
                if event.op is Op.FWD:
                    forwards.append((event.unit, len(waited)))
                elif event.unit == WAIT:
                    waited |= set(event.waits_on) - others
            for number, (unit, waits) in enumerate(forwards, 1):
                if waits < min(number, gathers):
                    how = "and the wait came after it" if len(waited) == gathers else "and nobody ever waited for it"
                    return Finding(
                        Grade.NOT_YET,
                        f"rank {rank}: with a slower network it may have another result, and {unit} is the first that "
                        "computes one.",
                        f" The cause: {unit} was computed from a weight whose all-gather may still have been under "
                        f"way, {how}: what was read is what happened to be there.",
                    )
        return Finding(Grade.OPTIMAL, "")


@dataclass(frozen=True)
class OrderFirst(OnRanks):
    """Looks at the order before the results, for these may be right by luck."""

    def grade(self, trial: Trial, ran: TrialRun, wrong: Sequence[Wrong]) -> Finding:
        finding = WaitsFirst().look(trial, ran)
        return super().grade(trial, ran, wrong) if finding.grade else finding


def waits_for_the_one_before(shards, x, compute):
    work = None
    for unit, shard in enumerate(shards):
        weight = torch.empty(len(shard) * dist.get_world_size(), shard.shape[1])
        before, work = work, dist.all_gather_into_tensor(weight, shard, async_op=True)
        if before is not None:
            before.wait()
        x = compute(unit, weight, x)
    if work is not None:
        work.wait()
    return x


def own_rows_only(shards, x, compute):
    for unit, shard in enumerate(shards):
        x = compute(unit, shard.repeat(dist.get_world_size(), 1), x)
    return x


EXERCISE = Exercise(
    title="Mend a loss that is wrong now and then",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=15,
    contract="A hand-made forward: every rank has its rows of each unit's weight and its own x; the weights are "
    "gathered and compute(unit, weight, x) gives the next x. Usually the result is right. On a busy machine it is "
    "wrong, now on this rank, now on that, and with print statements in between it is right again. Mend it: return "
    "the last x.",
    reference=case_36,
    stub=stub,
    why="With async_op=True the call returns before the data is there, with a handle. Who reads before handle.wait() "
    "reads what happened to be in memory, which on an idle machine is often what was to come. A pause or a print only "
    "makes it likelier. On a GPU wait() does not stop the CPU: it makes the compute stream wait for the collective's, "
    "and FSDP does it in wait_for_unshard, just before the unit computes.",
    cause="compute does not wait for the all-gather whose result it reads",
    hints=(
        "When a call returns a handle, is the work done? What else could the result depend on than the numbers?",
        "Whoever reads what a collective brings must have waited for it, however fast it usually is.",
        "Move one line. Between issuing the all-gather and computing there must be a wait.",
    ),
    judge=OrderFirst(
        inputs=inputs,
        truth=in_one_process,
        checks=(OnlyCollectives(frozenset({"all_gather"}), "all-gathers are all it takes"),),
        abs_=1e-4,
    ),
    wrong=(
        mutant({"work.wait()  # only then may anyone read it": ""}, "and nobody ever waited for it"),
        mutant({"work.wait()": "time.sleep(0.02)"}, "and nobody ever waited for it"),
        mutant({"work.wait()": "dist.barrier()"}, "and nobody ever waited for it"),
        Wrong(waits_for_the_one_before, "and the wait came after it"),
    ),
    shortcuts=(
        Wrong(own_rows_only, "numbers differ"),
        Wrong(lambda shards, x, compute: torch.zeros(WIDTH), "all of it is zero"),
    ),
    covers=("coverage 002.18",),
    stub_says="and the wait came after it",
)
