"""A tiny training run, by hand in one plain process and through `labs.wrapping` on ranks, for tests to compare."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.loop.optimizer import make_optimizer
from labs.model import build
from labs.model.gpt import GPTConfig
from labs.model.llama import LlamaConfig
from labs.wrapping import Wrapped, wrap

CPU = torch.device("cpu")
# How tests start ranks. One thread each: two that wait for one another are slow on a busy machine.
QUIET: dict[str, Any] = {"threads": 1, "timeout_s": 120, "progress": False, "show_output": False, "record": False}
STEPS, ROWS, MICRO_BATCHES, LR, MAX_NORM, SEED = 3, 12, 2, 1e-2, 0.5, 3

# Sizes that do not divide by 2, 3 or 4 ranks: 37 rows, 3 x 10 rows, norms of 10 numbers.
SHAPES: dict[str, Any] = {
    "gpt": GPTConfig(n_layer=3, n_head=2, d_model=10, vocab_size=37, context=16),
    "llama": LlamaConfig(n_layer=2, n_head=4, n_kv_head=2, d_model=24, d_ff=35, vocab_size=37, context=16),
}


@dataclass(frozen=True)
class Numbers:
    """What a run is compared by, one number per step."""

    losses: list[float]
    norms: list[float]
    label: str = ""


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (ROWS, 16). The first rows are short, so ranks and micro-batches have different counts."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(37, (2, ROWS, 16), generator=generator)
    y[:4, 5:] = -1
    return x, y


def by_hand(shape: str, weight_decay: float = 0.01) -> Numbers:
    """One process, the whole batch at once, nothing of `labs.wrapping` or `labs.loop.optimizer`."""
    model = build(SHAPES[shape], SEED)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(*batch(step))
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return Numbers(losses, norms)


def here() -> RankPlace:
    """The place of this rank, all of them on one machine."""
    if not dist.is_initialized():
        return RankPlace()
    rank, world = dist.get_rank(), dist.get_world_size()
    return RankPlace(rank, world, rank, world)


def config_of(settings: dict[str, Any], place: RankPlace) -> TrainConfig:
    micro_batch = ROWS // MICRO_BATCHES // place.world_size
    return TrainConfig(**{"seed": SEED, "lr": LR, "global_batch": ROWS, "micro_batch": micro_batch} | settings)


def wrapped_of(shape: str, settings: dict[str, Any], device: torch.device = CPU) -> tuple[Wrapped, TrainConfig]:
    config = config_of(settings, here())
    return wrap(config, SHAPES[shape], here(), device), config


def forward_backward(wrapped: Wrapped, step: int, device: torch.device = CPU) -> torch.Tensor:
    """Gradients of this rank's rows, in micro-batches; the loss of the whole batch."""
    place = here()
    x, y = batch(step)
    n_tokens = (y != -1).sum()
    mine = [t.chunk(place.world_size)[place.rank].to(device).chunk(MICRO_BATCHES) for t in (x, y)]
    total = torch.zeros((), device=device)
    for i, (rows, targets) in enumerate(zip(*mine, strict=True)):
        with wrapped.micro_batch(is_last=i == MICRO_BATCHES - 1):
            loss = wrapped.model(rows, targets, reduction="sum") * wrapped.replicas / n_tokens
            (wrapped.scaler.scale(loss) if wrapped.scaler else loss).backward()
        total += loss.detach()
    if place.world_size > 1:
        dist.all_reduce(total)
    return total / place.world_size


def train(shape: str, settings: dict[str, Any], device: torch.device = CPU) -> Numbers:
    wrapped, config = wrapped_of(shape, settings, device)
    optimizer = make_optimizer(wrapped, config)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(forward_backward(wrapped, step, device).item())
        assert {p.grad.dtype for p in wrapped.named_parameters().values() if p.grad is not None} == {torch.float32}
        if wrapped.scaler:
            wrapped.scaler.unscale_(optimizer)
        norms.append(wrapped.clip_grad_norm(MAX_NORM).item())
        if wrapped.scaler:
            wrapped.scaler.step(optimizer)
            wrapped.scaler.update()
        else:
            optimizer.step()
    return Numbers(losses, norms, wrapped.label)


def each(function: Any, cases: list[Any]) -> list[Any]:
    """What the function returns for each case, on this rank: many in one start of the ranks. Errors as text."""
    results = []
    for case in cases:
        try:
            results.append(function(*case))
        except Exception:
            results.append(traceback.format_exc())
    return results
