"""torch's clip_grad_norm_ is wrong with FSDP2: true or false?"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import CollectiveOrder, Inputs, OnRanks

RANKS, MAX_NORM = 2, 1.0
SHAPES = ((100, 400), (60, 500))  # of a rank's rows


def clip_of_dtensors(rows, max_norm):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = torch.cat([mine.flatten() for mine in rows]).norm().item()
    grads = [DTensor.from_local(mine, mesh, [Shard(0)]) for mine in rows]
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    norm: Any = nn.utils.clip_grad_norm_(params, max_norm)
    norm = norm.full_tensor().item()
    return {"true": norm <= own, "norm": norm, "rows": [grad.to_local() for grad in grads]}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    return [([torch.randn(shape, generator=draw) * (1 + rank) for shape in SHAPES], MAX_NORM) for rank in range(RANKS)]


def norms(inputs: Inputs) -> torch.Tensor:
    """Of each rank's rows."""
    return torch.stack([torch.cat([mine.flatten() for mine in rows]).norm() for rows, _ in inputs])


def clipped(inputs: Inputs, by: torch.Tensor, claim: bool) -> list[dict[str, Any]]:
    """Each rank's rows clipped by a norm of its own."""
    return [
        {"true": claim, "norm": float(norm), "rows": [mine * MAX_NORM / float(norm) for mine in rows]}
        for (rows, _), norm in zip(inputs, by, strict=True)
    ]


def plain_tensors(rows, max_norm):
    params = [nn.Parameter(torch.zeros_like(mine)) for mine in rows]
    for param, mine in zip(params, rows, strict=True):
        param.grad = mine
    norm = nn.utils.clip_grad_norm_(params, max_norm).item()
    return {"true": True, "norm": norm, "rows": [param.grad for param in params]}


def gathers_first(rows, max_norm):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    grads = [DTensor.from_local(mine, mesh, [Shard(0)]) for mine in rows]
    norm = torch.cat([grad.full_tensor().flatten() for grad in grads]).norm().item()
    return {"true": False, "norm": norm, "rows": [mine * max_norm / norm for mine in rows]}


EXERCISE = Exercise(
    title="Settle whether torch clips sharded gradients rightly",
    kind=ExerciseKind.CLAIM,
    difficulty=3,
    importance=4,
    minutes=20,
    contract='"torch.nn.utils.clip_grad_norm_ is wrong with FSDP2: each rank clips by the norm of its own rows; to be '
    "right it would have to gather all gradients.\" Settle it on 2 ranks: given this rank's rows of two gradients, "
    "make DTensor parameters with DTensor gradients (Shard(0), as fully_shard makes them), call clip_grad_norm_, and "
    "return {'true': True or False, 'norm': the whole norm, 'rows': this rank's rows, clipped}.",
    reference=clip_of_dtensors,
    why="False, in both halves. A DTensor knows that its rows are part of a whole, so its norm is that of the whole: "
    "each rank takes its rows' and one all-reduce puts them together, a number for each parameter. No gradient is "
    "gathered, scattered or even looked at by another rank. The half-truth comes from FSDP1, whose shards are plain "
    "tensors: there use model.clip_grad_norm_.",
    hints=(
        "What tells torch that a tensor is only a part, and what tells it nothing?",
        "DTensor.from_local(rows, mesh, [Shard(0)]) makes a part of a whole; mesh: init_device_mesh('cpu', (2,)).",
        "nn.Parameter of a DTensor of zeros, .grad a DTensor of the rows; clip; norm.full_tensor(); grad.to_local().",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=lambda inputs: clipped(inputs, norms(inputs).norm().expand(RANKS), claim=False),
        causes=(
            (
                lambda inputs: clipped(inputs, norms(inputs), claim=True),
                "that is the norm of plain tensors, which know nothing of the other ranks: make DTensors of them",
            ),
            (
                lambda inputs: clipped(inputs, norms(inputs).norm().expand(RANKS), claim=True),
                "norm and rows are right on every rank, so the statement is false",
            ),
        ),
        checks=(CollectiveOrder(lambda trial: ["all_reduce"], "what clip_grad_norm_ issues for DTensors"),),
        rel=1e-4,
    ),
    wrong=(
        Wrong(plain_tensors, "that is the norm of plain tensors"),
        mutant({"norm <= own": "True"}, "so the statement is false", name="other conclusion"),
        Wrong(gathers_first, "expected all_reduce, found all_gather"),
        mutant(
            {"from_local(mine,": "from_local(mine.clone(),", "[grad.to_local() for grad in grads]": "rows"},
            "numbers differ",
            name="not clipped",
        ),
    ),
    shortcuts=(
        Wrong(lambda rows, max_norm: {"true": False, "norm": 0.6506, "rows": rows}, "expected"),
        Wrong(lambda rows, max_norm: {"true": False}, "there is no 'norm'"),
    ),
    covers=("misconception 6", "misconception 24", "coverage 004.98", "coverage 002.31"),
)
