"""Two micro-batches with FSDP1, in mixed precision, become the same with fully_shard."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_

from fsdp_sim.learn.apart import Trial, TrialRun
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.migration.ddp_step_to_fsdp2 import (
    BLOCKS,
    LR,
    MAX_NORM,
    RANKS,
    WIDTH,
    ReduceScatterCount,
    transformer,
)
from fsdp_sim.learn.judges import Inputs, OnRanks
from fsdp_sim.learn.verdict import Finding, Grade


def fsdp1_step_to_fsdp2(model, micro_batches, lr, max_norm):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model[1:-1]:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for i, (rows, targets) in enumerate(micro_batches, start=1):
        model.set_requires_gradient_sync(i == len(micro_batches))
        F.mse_loss(model(rows).float(), targets).backward()
    norm = clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return {"norm": norm.item(), "weights": [p.full_tensor() for p in model.parameters()]}


@dataclass(frozen=True)
class MessageDtype:
    """The dtype in which each rank's messages for units travel; parameters gathered one by one are of no unit."""

    op: str
    dtype: str
    cure: str

    def look(self, trial: Trial, ran: TrialRun) -> Finding:
        for rank, records in enumerate(ran.records):
            for record in records:
                if record.op == self.op and record.unit and record.dtype != self.dtype:
                    message = f"rank {rank}: expected every {self.op} of a unit in {self.dtype}, found {record.dtype}"
                    return Finding(Grade.NOT_YET, f"{message}; {self.cure}.")
        return Finding(Grade.PASS, "")


def inputs(seed: int) -> Inputs:
    draw, model = torch.Generator().manual_seed(seed), transformer(seed)

    def rows() -> torch.Tensor:
        return torch.randn(2, 8, WIDTH, generator=draw)

    return [(copy.deepcopy(model), [(rows(), rows()) for _ in range(2)], LR, MAX_NORM) for _ in range(RANKS)]


def stepped(inputs: Inputs, micro_batches: slice = slice(None), clip: bool = True) -> list[dict[str, Any]]:
    """In one process: gradients of each micro-batch in bf16, summed, averaged over the ranks and stepped in fp32."""
    model = copy.deepcopy(inputs[0][0])
    for _, batches, *_ in inputs:
        for rows, targets in batches[micro_batches]:
            low = copy.deepcopy(model).bfloat16()
            low.zero_grad()
            F.mse_loss(low(rows.bfloat16()).float(), targets).backward()
            for p, q in zip(model.parameters(), low.parameters(), strict=True):
                p.grad = (0 if p.grad is None else p.grad) + q.grad.float() / RANKS
    norm = clip_grad_norm_(model.parameters(), MAX_NORM if clip else float("inf")).item()
    torch.optim.SGD(model.parameters(), LR).step()
    return [{"norm": norm, "weights": [p.detach() for p in model.parameters()]}] * RANKS


EXERCISE = Exercise(
    title="Translate an FSDP1 step with accumulation",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="Each of 2 ranks is given the same model (a Sequential: a Linear, blocks, a Linear) and a list of "
    "micro-batches (rows, targets). Do with fully_shard what the FSDP1 code above does: each block a unit, compute in "
    "bf16, reduce in fp32, gradients summed over the micro-batches and reduced once, clip, SGD. The loss is the mean "
    "squared error of the output as fp32. Return {'norm': before clipping, 'weights': the list of whole parameters}.",
    reference=fsdp1_step_to_fsdp2,
    why="no_sync becomes set_requires_gradient_sync, a setting and no context: whole gradients stay on every rank "
    "until the last micro-batch. MixedPrecision becomes MixedPrecisionPolicy, given to every call. The method "
    "clip_grad_norm_ goes: torch.nn.utils' sees DTensors and takes the norm over all ranks. What FSDP1 named for the "
    "whole model, FSDP2 is told unit by unit.",
    hints=(
        "Go through the FSDP1 code argument by argument, method by method: which of them has fully_shard?",
        "auto_wrap_policy is a loop, mixed_precision is mp_policy on every call, no_sync is a setter that takes "
        "whether to sync, and clipping is torch.nn.utils'.",
        "Before each backward: set_requires_gradient_sync on the model, True for the last micro-batch only.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=stepped,
        causes=(
            (lambda inputs: stepped(inputs, slice(-1, None)), "only the last micro-batch is in it"),
            (lambda inputs: stepped(inputs, clip=False), "the gradients were not clipped: pass max_norm"),
        ),
        checks=(
            MessageDtype("all_gather", "bf16", "param_dtype belongs to every call of fully_shard"),
            MessageDtype("reduce_scatter", "fp32", "without reduce_dtype gradients travel in the dtype of compute"),
            ReduceScatterCount(
                BLOCKS + 1,
                {
                    1: "the whole model is one unit; shard the blocks first",
                    2 * (BLOCKS + 1): "every micro-batch was reduced, where no_sync reduces the last one only",
                },
            ),
        ),
        rel=1e-3,
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {"model.set_requires_gradient_sync(i == len(micro_batches))\nF.mse": "with model.no_sync():\n    F.mse"},
            "has no attribute 'no_sync'",
            name="no sync left",
        ),
        mutant(
            {"clip_grad_norm_(model.parameters(), max_norm)": "model.clip_grad_norm_(max_norm)"},
            "has no attribute 'clip_grad_norm_'",
            name="clip left",
        ),
        mutant({"model.set_requires_gradient_sync(i == len(micro_batches))": ""}, "every micro-batch was reduced"),
        mutant({", reduce_dtype=torch.float32": ""}, "without reduce_dtype"),
        mutant({"for block in model[1:-1]:\nfully_shard(block, mp_policy=policy)": ""}, "the whole model is one unit"),
        mutant({"parameters(), max_norm)": "parameters(), float('inf'))"}, "the gradients were not clipped"),
    ),
    shortcuts=(
        mutant(
            {"for i, (rows": "micro_batches = micro_batches[-1:]\nfor i, (rows"},
            "only the last micro-batch is in it",
            name="last alone",
        ),
        Wrong(lambda *given: {"norm": 0.5, "weights": []}, "norm: expected"),
    ),
    covers=("misconception 23", "coverage 004.108", "coverage 002.33", "misconception 4.7", "misconception 4.51"),
)
