"""What a rank really keeps from step to step, with DDP and with FSDP."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks
from fsdp_sim.spec import DTYPE_BYTES, OPTIMIZER_STATES

RANKS, WIDTH = 2, 40
WAYS = ("ddp", "fsdp", "fsdp bf16")


def bytes_kept(train):
    def size(tensors):
        return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)

    kept = {}
    for how in ("ddp", "fsdp", "fsdp bf16"):
        model, optimizer = train(how)
        weights = list(model.parameters())
        moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        kept[how] = [size(weights), size(w.grad for w in weights), size(moments)]
    return kept


def train(rows: Sequence[int], how: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One step of a small model whose weights have these rows."""
    model: nn.Module = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise((WIDTH, *rows))))
    if how == "ddp":
        model = DistributedDataParallel(model)
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if how == "fsdp bf16" else MixedPrecisionPolicy()
        for layer in model.children():
            fully_shard(layer, mp_policy=policy)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def inputs(seed: int) -> Inputs:
    rows = random.Random(seed).sample(range(20, 200), 3)
    return [(functools.partial(train, rows),)] * RANKS


def added_up(inputs: Inputs) -> list[dict[str, list[int]]]:
    """From the shapes alone: rows are cut as torch.chunk cuts them."""
    shapes = [(b, a) for a, b in pairwise((WIDTH, *inputs[0][0].args[0]))]
    found = []
    for rank in range(RANKS):
        whole, mine = (
            DTYPE_BYTES["fp32"] * sum(rows * columns for rows, columns in of)
            for of in (shapes, [(_chunk(rows, rank), columns) for rows, columns in shapes])
        )
        kept = dict(zip(WAYS, (whole, mine, mine), strict=True))
        found.append({how: [size, size, OPTIMIZER_STATES["adamw"] * size] for how, size in kept.items()})
    return found


def _chunk(rows: int, rank: int) -> int:
    chunks = torch.arange(rows).chunk(RANKS)
    return len(chunks[rank]) if rank < len(chunks) else 0


def altered(change: Callable[[str, list[int], list[int]], list[int]]) -> Callable[[Inputs], list[Any]]:
    """What an answer would be that counts otherwise: from the way, the right numbers, and those of DDP."""

    def mistaken(inputs: Inputs) -> list[Any]:
        return [{how: change(how, of[how], of["ddp"]) for how in WAYS} for of in added_up(inputs)]

    return mistaken


def times_ranks(how: str, mine: list[int], whole: list[int]) -> list[int]:
    return [n * RANKS for n in whole] if how == "ddp" else mine


def whole_shapes(how: str, mine: list[int], whole: list[int]) -> list[int]:
    return whole


def one_moment(how: str, mine: list[int], whole: list[int]) -> list[int]:
    return [mine[0], mine[1], mine[2] // 2]


def half_in_bf16(how: str, mine: list[int], whole: list[int]) -> list[int]:
    return [mine[0] // 2, mine[1] // 2, mine[2]] if "bf16" in how else mine


EXERCISE = Exercise(
    title="Measure what a rank keeps",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=25,
    contract="train(how) trains a small model for one step on this rank and returns the model and its AdamW; how is "
    "'ddp', 'fsdp' or 'fsdp bf16' (with param_dtype bf16). For each of the three, return the bytes that this rank "
    "keeps afterwards, as a dict from how to the list [parameters, gradients, moments]. The moments are exp_avg and "
    "exp_avg_sq.",
    reference=bytes_kept,
    why="With DDP every rank keeps one whole copy, 4 + 4 + 8 bytes per parameter, however many ranks there are. With "
    "FSDP a DTensor has the shape of the whole and the memory of a shard: to_local() is what a rank keeps, and the "
    "last rank may keep fewer rows. param_dtype changes none of it: shards, gradients and moments stay fp32, the "
    "bf16 copy lives only while a unit is whole, and there is no further master copy.",
    hints=(
        "A DTensor's shape is that of the whole tensor. What of it is in this rank's memory?",
        "Of each tensor: the nbytes of its local part. The moments are in optimizer.state.",
        "mine = t.to_local() if it is a DTensor else t; sum over parameters, over their .grad, and over both moments.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=added_up,
        causes=(
            (
                altered(whole_shapes),
                "a DTensor's numel() and nbytes are those of the whole; this rank keeps to_local() of it",
            ),
            (altered(times_ranks), "a DDP rank keeps one copy, not one for each rank; that is the sum over all"),
            (altered(one_moment), "AdamW keeps two moments, exp_avg and exp_avg_sq"),
            (altered(half_in_bf16), "param_dtype is what is gathered and computed with; what is kept stays fp32"),
        ),
    ),
    wrong=(
        mutant(
            {'(t.to_local() if hasattr(t, "to_local") else t).nbytes': "t.nbytes"},
            "a DTensor's numel() and nbytes are those of the whole",
            name="whole shapes",
        ),
        mutant(
            {"return kept": 'return kept | {"ddp": [RANKS * n for n in kept["ddp"]]}'},
            "a DDP rank keeps one copy",
            name="times ranks",
        ),
        mutant({'("exp_avg", "exp_avg_sq")': '("exp_avg",)'}, "AdamW keeps two moments", name="one moment"),
        mutant(
            {"return kept": "kept[how][:2] = [n // 2 for n in kept[how][:2]]\nreturn kept"},
            "what is kept stays fp32",
            name="half in bf16",
        ),
    ),
    shortcuts=(
        Wrong(lambda train: {how: [16000, 16000, 32000] for how in WAYS}, "expected"),
        Wrong(lambda train: bytes_kept(lambda how: train("fsdp")), "expected"),
    ),
    covers=("misconception 2", "misconception 15", "coverage 000.2", "coverage 000.3", "coverage 003.2"),
)
