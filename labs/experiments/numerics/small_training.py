"""The small GPT that the experiments share, spread over the ranks of a call, and its gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from labs.checkpoint.state import whole
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.data import load_corpus
from labs.model import build
from labs.model.gpt import GPTConfig
from labs.wrapping import Wrapped, wrap

MODEL = GPTConfig.preset("teaching", n_layer=2)
SEQ_LEN = 64


def rows_of(n: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, each (n, SEQ_LEN); the same on every rank."""
    x, y = load_corpus().batch(0, first + n, SEQ_LEN)
    return x[first:], y[first:]


def spread(**changes: Any) -> Wrapped:
    """`MODEL` spread over the ranks of this call."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place = RankPlace(rank, ranks, rank, ranks)
    return wrap(TrainConfig(n_layer=MODEL.n_layer, **changes), MODEL, place, torch.device("cpu"))


def gradients_whole(wrapped: Wrapped) -> torch.Tensor:
    """Those of all parameters, whole, as one vector. A collective call."""
    return torch.cat([whole(p.grad).flatten() for p in wrapped.model.parameters() if p.grad is not None])


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    """The norm of the difference, over that of ``b``."""
    return float((a - b).norm() / b.norm())


def gradients_of(ranks: int, rows: int = 2) -> torch.Tensor:
    """The gradients (ranks, parameters) that so many ranks would have, computed by one process in fp32."""
    model, found = build(MODEL), []
    x, y = rows_of(ranks * rows)
    for i in range(ranks):
        mine = slice(i * rows, (i + 1) * rows)
        grads = torch.autograd.grad(model(x[mine], y[mine]), list(model.parameters()))
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(found)
