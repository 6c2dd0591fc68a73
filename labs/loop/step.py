"""One optimizer step: micro-batches, the loss of all tokens, the gradients' norm, and what all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labs.config import TrainConfig
from labs.data.loader import Batch
from labs.loop.failpoints import failpoint
from labs.loop.optimizer import lr_at
from labs.wrapping import Wrapped


@dataclass(frozen=True)
class StepOutcome:
    """What a step did; the same on every rank.

    Attributes:
        loss: mean over the tokens of the whole batch, in nats.
        grad_norm: of all gradients, before clipping.
        stop: the exit status with which some rank wants to leave, see `Agreement`; 0 if none does.
        finite: whether loss and gradients are finite on all ranks; a scaler's gradients may overflow now and then.
        updated: whether the parameters were. Not if something was not finite, a scaler's gradients included.
    """

    loss: float
    grad_norm: float
    lr: float
    stop: int
    finite: bool
    updated: bool


def train_step(
    wrapped: Wrapped, optimizer: torch.optim.Optimizer, batch: Batch, step: int, config: TrainConfig, *,
    n_micro_batches: int = 1, stop: Callable[[], int] = lambda: 0,
) -> StepOutcome:  # fmt: skip
    """One step on this rank's rows.

    The loss is the sum over this rank's tokens, divided by the tokens of the whole batch: ranks with fewer tokens count
    for less, and so do micro-batches (a mean of means is not the mean). FSDP and DDP average over ranks, so it is
    multiplied by their number before backward.

    Args:
        batch: ``x`` and ``y`` of shape (rows, seq) on the rank's device, ``n_tokens`` of the whole batch.
        stop: the exit status with which this rank wants to leave, see `labs.loop.stopping`; asked as late as possible.
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
            if failpoint("loss", step) == "nan":
                loss = loss * math.nan
            (wrapped.scaler.scale(loss) if wrapped.scaler else loss).backward()
        losses.append(loss.detach())
    if wrapped.scaler:
        wrapped.scaler.unscale_(optimizer)
    norm = wrapped.clip_grad_norm(config.clip)
    # A request to stop travels with the loss: all ranks leave after the same step, none updates with another's NaN.
    agreed = Agreement(torch.stack(losses).sum(), norm, stop())
    # Fused AdamW reads on the device whether to leave the update out, so it is queued before the host knows: a GPU does
    # not wait for that. (The attribute is torch.amp.GradScaler's; state that is offloaded is updated elsewhere.)
    first = optimizer.param_groups[0]
    same_device = first["params"][0].device == agreed.not_finite.device
    on_device = wrapped.scaler is None and bool(first.get("fused")) and same_device
    if on_device:
        optimizer.found_inf = agreed.not_finite  # type: ignore[attr-defined]
        optimizer.step()
    mean, norm_value, asked = agreed.read()
    mean /= wrapped.replicas
    updates = math.isfinite(mean) and math.isfinite(norm_value)
    if wrapped.scaler:
        if updates:
            wrapped.scaler.step(optimizer)
        wrapped.scaler.update()  # also without a step, for it unscaled: it refuses to do so twice
    elif updates and not on_device:
        optimizer.step()
    # With a scaler, gradients that overflow are expected: it has just lowered its scale.
    finite = math.isfinite(mean) and (wrapped.scaler is not None or math.isfinite(norm_value))
    return StepOutcome(mean, norm_value, lr, asked, finite, updates)


class Agreement:
    """What all ranks know of a step: it is on its way to the host while the device goes on.

    Args:
        loss: this rank's, 0-dim.
        norm: of the gradients of all ranks, the same on each.
        stop: the exit status with which this rank wants to leave.

    Attributes:
        not_finite: 1.0 if a loss or the norm is not finite, else 0.0; on the device, 0-dim.
    """

    def __init__(self, loss: torch.Tensor, norm: torch.Tensor, stop: int) -> None:
        self.ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        of_ranks = torch.zeros(2, self.ranks, device=loss.device)
        of_ranks[:, rank] = torch.stack([loss.float(), torch.full_like(loss, stop, dtype=torch.float32)])
        if self.ranks > 1:
            dist.all_reduce(of_ranks)
        numbers = torch.cat([of_ranks.flatten(), norm.to(loss.device, torch.float32)[None]])
        self.not_finite = (~torch.isfinite(numbers)).any().float()
        self._on_host, self._copied = numbers, None
        if numbers.device.type == "cuda":
            self._on_host = torch.empty(numbers.shape, pin_memory=True).copy_(numbers, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> tuple[float, float, int]:
        """The sum over ranks of the loss; the norm; and the request to stop that all follow. Waits for the backward.

        Of two requests the lower exit status counts: SIGTERM's 75 before Ctrl-C's 130.
        """
        if self._copied is not None:
            self._copied.synchronize()
        numbers = self._on_host.tolist()
        losses, stops, norm = numbers[: self.ranks], numbers[self.ranks : -1], numbers[-1]
        return sum(losses), norm, int(min(filter(None, stops), default=0))
