"""One optimizer step: micro-batches, the loss of all tokens, the gradients' norm, and what all ranks agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.config import TrainConfig
from labs.loader import Batch
from labs.optimizer import lr_at
from labs.points import point
from labs.wrapping import Wrapped


@dataclass(frozen=True)
class Outcome:
    """What a step did; the same on every rank.

    Attributes:
        loss: mean over the tokens of the whole batch, in nats.
        grad_norm: of all gradients, before clipping.
        stop: the exit status with which some rank wants to leave; 0 if none does.
        finite: whether loss and gradients are finite on all ranks; if not, nothing was updated.
    """

    loss: float
    grad_norm: float
    lr: float
    stop: int
    finite: bool


class NotFiniteError(ArithmeticError):
    """Loss or gradients are NaN or infinite."""


def train_step(
    wrapped: Wrapped, optimizer: torch.optim.Optimizer, batch: Batch, step: int, config: TrainConfig, *,
    n_micro_batches: int = 1, stop: int = 0,
) -> Outcome:  # fmt: skip
    """One step on this rank's rows.

    The loss is the sum over this rank's tokens, divided by the tokens of the whole batch: ranks with fewer tokens count
    for less, and so do micro-batches (a mean of means is not the mean). FSDP and DDP average over ranks, so it is
    multiplied by their number before backward.

    Args:
        batch: ``x`` and ``y`` of shape (rows, seq) on the rank's device, ``n_tokens`` of the whole batch.
        stop: the exit status with which this rank wants to leave, see `labs.stopping`.
    """
    lr = lr_at(step, config)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)
    weight = wrapped.replicas / batch.n_tokens
    losses = []
    for i, (x, y) in enumerate(zip(batch.x.chunk(n_micro_batches), batch.y.chunk(n_micro_batches), strict=True)):
        with wrapped.micro_batch(is_last=i == n_micro_batches - 1):
            loss = wrapped.model(x, y, reduction="sum") * weight
            if point("loss", step) == "nan":
                loss = loss * math.nan
            (wrapped.scaler.scale(loss) if wrapped.scaler else loss).backward()
        losses.append(loss.detach())
    if wrapped.scaler:
        wrapped.scaler.unscale_(optimizer)
    norm = wrapped.clip_grad_norm(config.clip)
    # The wish to stop travels with the loss: all ranks leave after the same step, and none updates with another's NaN.
    mean, norm_value, asked = agree(torch.stack(losses).sum(), norm, stop)
    mean /= wrapped.replicas
    # With a scaler, gradients that overflow are expected: it skips the update and lowers its scale.
    finite = math.isfinite(mean) and (wrapped.scaler is not None or math.isfinite(norm_value))
    if finite:
        if wrapped.scaler:
            wrapped.scaler.step(optimizer)
            wrapped.scaler.update()
        else:
            optimizer.step()
    return Outcome(mean, norm_value, lr, asked, finite)


def agree(loss: torch.Tensor, norm: torch.Tensor, stop: int) -> tuple[float, float, int]:
    """The sum over ranks of the loss; the norm, which is the same on all; and the highest wish to stop."""
    norm = norm.to(loss.device, torch.float32)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        total, norm_value = torch.stack([loss.float(), norm]).tolist()
        return total, norm_value, stop
    mine = torch.zeros(dist.get_world_size(), 2, device=loss.device)
    mine[dist.get_rank()] = torch.stack([loss.float(), torch.full_like(loss, stop, dtype=torch.float32)])
    dist.all_reduce(mine)
    total, asked, norm_value = torch.stack([mine[:, 0].sum(), mine[:, 1].max(), norm]).tolist()  # one copy to the host
    return total, norm_value, int(asked)
