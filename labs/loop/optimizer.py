"""AdamW with decay for matrices only, and the learning rate of each step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from labs.config import TrainConfig
from labs.wrapping import Wrapped


def make_optimizer(wrapped: Wrapped, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over this rank's parameters or shards, in two groups: what decays, and what does not.

    Parameters that had at least two dimensions before wrapping decay (matrices and embeddings), biases and norms do
    not. Decided by name, for FSDP1's shards are all 1-D. Make it right after wrapping: after a forward FSDP2's root
    has whole parameters in the place of its shards, and an optimizer that holds those never changes the shards.

    Returns:
        fused: one kernel for all parameters, which `labs.loop.step` can tell on the device to leave an update out.
        Every group's ``lr`` is ``config.lr``, see `lr_at`.

    Raises:
        ValueError: weight decay for parameters that are flattened beyond recognition.
    """
    named = wrapped.named_parameters()
    if config.weight_decay and (flat := [name for name in named if name not in wrapped.shapes]):
        raise ValueError(
            f"weight_decay={config.weight_decay}, but {flat[0]} holds both what decays and what does not; use "
            "weight_decay=0 or use_orig_params=true"
        )
    decays = {name for name, shape in wrapped.shapes.items() if len(shape) >= 2}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name in decays], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named.items() if name not in decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        # FSDP1's scaler has found_inf of shape (1,), on which fused AdamW fails (torch 2.13: _foreach_sub_ from 0-dim).
        fused=not isinstance(wrapped.scaler, ShardedGradScaler),
    )


def lr_at(step: int, config: TrainConfig) -> float:
    """The learning rate of a step, counted from 0.

    It rises linearly over ``warmup_steps``: the first has ``lr / warmup_steps``, the last of them ``lr``. Then it
    stays, or falls along half a cosine to ``min_lr`` (by default ``lr / 10``) at the last of ``steps``.

    Example:
        >>> config = TrainConfig(lr=0.4, min_lr=0.0, schedule="cosine", warmup_steps=2, steps=6)
        >>> [round(lr_at(step, config), 3) for step in range(6)]
        [0.2, 0.4, 0.341, 0.2, 0.059, 0.0]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    peak = max(config.warmup_steps - 1, 0)  # the step that has lr
    done = min((step - peak) / max(config.steps - 1 - peak, 1), 1.0)
    end = config.lr / 10 if config.min_lr is None else config.min_lr
    return end + (config.lr - end) * (1 + math.cos(math.pi * done)) / 2
