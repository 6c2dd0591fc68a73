"""A step with DDP becomes one with fully_shard: the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist  # noqa: F401 - in edits
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel  # noqa: F401 - in edits
from torch.nn.utils import clip_grad_norm_

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks
from fsdp_sim.learn.verdict import Finding, Grade

RANKS, BLOCKS, WIDTH = 2, 3, 64
LR, MAX_NORM = 0.1, 0.05


def ddp_step_to_fsdp2(model, rows, targets, lr, max_norm):
    for block in model[1:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    F.mse_loss(model(rows), targets).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return {"norm": norm.item(), "weights": [p.full_tensor() for p in model.parameters()]}


@dataclass(frozen=True)
class ReduceScatterCount:
    """Each rank reduce-scatters so many times: once for each unit.

    Attributes:
        instead: what another number of times comes from.
    """

    times: int
    instead: Mapping[int, str]

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, records in enumerate(ran.records):
            found = sum(record.op == "reduce_scatter" for record in records)
            if found != self.times:
                cause = f": {self.instead[found]}" if found in self.instead else ""
                expected = f"expected {self.times} reduce-scatters, one for each unit"
                return Finding(Grade.NOT_YET, f"rank {rank}: {expected}, found {found}{cause}.")
        return Finding(Grade.PASS, "")


def transformer(seed: int) -> nn.Sequential:
    """Blocks between two Linears, which are left to the root."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True) for _ in range(BLOCKS)]
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH))


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model = transformer(seed)
    return [
        (copy.deepcopy(model), *(torch.randn(2, 8, WIDTH, generator=draw) for _ in range(2)), LR, MAX_NORM)
        for _ in range(RANKS)
    ]


def stepped(inputs: Inputs, times_lr: float = 1.0) -> list[dict[str, Any]]:
    """The whole batch in one process."""
    model = copy.deepcopy(inputs[0][0])
    rows, targets = (torch.cat([of_rank[i] for of_rank in inputs]) for i in (1, 2))
    F.mse_loss(model(rows), targets).backward()
    norm = clip_grad_norm_(model.parameters(), MAX_NORM).item()
    torch.optim.SGD(model.parameters(), times_lr * LR).step()
    return [{"norm": norm, "weights": [p.detach() for p in model.parameters()]}] * RANKS


EXERCISE = Exercise(
    title="Convert a DDP step to FSDP2",
    kind=ExerciseKind.CODE,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="Each of 2 ranks is given the same model (a Sequential: a Linear, blocks, a Linear), its own rows and "
    "targets, lr and max_norm. Do one step as DDP would (mean squared error, clip, SGD), with torch's fully_shard: "
    "each block is a unit, the rest the root. Return {'norm': the norm before clipping, 'weights': the list of the "
    "whole parameters after the step}.",
    reference=ddp_step_to_fsdp2,
    why="The wrap becomes a loop over the blocks and one call for the rest; everything else of a DDP loop stays. The "
    "optimizer comes after sharding, for it must hold the shards. Gradients are averaged over the ranks as DDP's are, "
    "so lr stays. The norm of DTensors is that of all ranks, and full_tensor gathers what only a shard is left of.",
    hints=(
        "What does DistributedDataParallel(model) do, and which two calls of fully_shard take its place?",
        "Blocks first, then the model; the optimizer after both. The clipping is torch.nn.utils', unchanged.",
        "Loop over model[1:-1] with fully_shard, then the model, then SGD; at the end full_tensor() of each parameter.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=stepped,
        causes=(
            (
                lambda inputs: [
                    {**right, "weights": [p.detach() for p in model.parameters()]}
                    for right, (model, *_) in zip(stepped(inputs), inputs, strict=True)
                ],
                "no weight has moved: the optimizer holds the parameters from before sharding, which nothing uses",
            ),
            (
                lambda inputs: stepped(inputs, times_lr=RANKS),
                "the step is as many times too large as there are ranks: gradients are averaged, lr stays",
            ),
            (
                lambda inputs: [stepped([of_rank])[0] for of_rank in inputs],
                "each rank has stepped alone: nothing of the other's gradients is in it",
            ),
        ),
        checks=(
            OnlyCollectives(
                frozenset({"all_gather", "reduce_scatter", "all_reduce"}), "DDP sends its weights when it wraps"
            ),
            ReduceScatterCount(
                BLOCKS + 1,
                {
                    0: "the model is not sharded",
                    1: "the whole model is one unit, which is gathered at once; shard the blocks first",
                },
            ),
        ),
        rel=1e-4,
    ),
    wrong=(
        mutant(
            {
                "for block in model[1:-1]:\nfully_shard(block)\nfully_shard(model)": (
                    "model = DistributedDataParallel(model)"
                ),
                "p.full_tensor()": "p.detach()",
            },
            "found broadcast; DDP sends its weights when it wraps",
            name="with ddp",
        ),
        mutant({"for block in model[1:-1]:\nfully_shard(block)": ""}, "the whole model is one unit", name="one unit"),
        mutant(
            {
                "for block in": "optimizer = torch.optim.SGD(model.parameters(), lr)\nfor block in",
                "optimizer = torch.optim.SGD(model.parameters(), lr)": "",
            },
            "the optimizer holds the parameters from before sharding",
            name="optimizer first",
        ),
        mutant(
            {"parameters(), lr)": "parameters(), lr * dist.get_world_size())"},
            "gradients are averaged, lr stays",
            name="lr times ranks",
        ),
        mutant({"fully_shard(model)": ""}, "mixed torch.Tensor and DTensor", name="root forgotten"),
    ),
    shortcuts=(
        mutant(
            {
                "for block in model[1:-1]:\nfully_shard(block)\nfully_shard(model)": "",
                "p.full_tensor()": "p.detach()",
            },
            "each rank has stepped alone",
            name="alone",
        ),
        Wrong(lambda *given: {"norm": 1.0, "weights": []}, "norm: expected"),
    ),
    covers=("coverage 000.23", "coverage 004.41", "coverage 004.55", "misconception 4.60", "pitfall 11", "pitfall 13"),
)
