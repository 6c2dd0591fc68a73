"""What the trainer gets, whatever the api: `Wrapped`. And what each api starts from: `Job`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.wrapping.wrap_policy import Units

# What FSDP1, activation checkpointing and torch.compile put into the names of parameters.
_ADDED = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class Job:
    """A model to be wrapped.

    Attributes:
        model: with its weights on the CPU, or on the meta device; its blocks are checkpointed and compiled already.
        plain: the same model as it was first, on the meta device: names, shapes and ties.
    """

    config: TrainConfig
    model: nn.Module
    plain: nn.Module
    units: Units
    place: RankPlace
    device: torch.device
    mesh: DeviceMesh | None

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: param.shape for name, param in self.plain.named_parameters()}


@dataclass
class Wrapped:
    """A model spread over the ranks, and what differs between the ways to do it.

    Attributes:
        model: called with tokens and targets, returns this rank's loss.
        shapes: of the whole parameters, by their names before wrapping; a tied one has one name.
        replicas: over how many ranks gradients are averaged; a loss that is a sum is multiplied by it.
        label: one line that says what it is.
        scaler: scales the loss in fp16, whose smallest numbers are too large for gradients; else None.
    """

    api: str
    model: nn.Module
    shapes: dict[str, torch.Size]
    replicas: int
    label: str
    scaler: torch.amp.GradScaler | None = field(default=None, kw_only=True)

    @property
    def n_params(self) -> int:
        """How many numbers are trained, over all ranks; counted by the shapes before wrapping (FSDP1 has shards)."""
        return sum(shape.numel() for shape in self.shapes.values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps: this rank's parameters or shards, by the names they had before wrapping."""
        return {original_name(name): param for name, param in self.model.named_parameters()}

    @contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """Around forward and backward of one micro-batch. ``is_last``: of the optimizer step."""
        yield

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Around forwards without gradients or dropout. All ranks have to do equally many."""
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():  # not inference_mode: a gathered parameter made in it could not be trained again
                yield
        finally:
            self.model.train(training)

    def clip_grad_norm(self, max_norm: float | None) -> torch.Tensor:
        """Scale all gradients down so that their norm is at most ``max_norm``; None only measures.

        Returns:
            the 2-norm over all parameters and ranks before clipping: 0-dim, the same on all ranks, NaN or infinite
            where gradients are.
        """
        params = [param for param in self.model.parameters() if param.grad is not None]
        norm = get_total_norm([param.grad for param in params if param.grad is not None])
        if isinstance(norm, DTensor):  # of shards: the sum over ranks is still to be made
            norm = norm.full_tensor()
        if max_norm is not None:
            clip_grads_with_norm_(params, max_norm, norm)
        return norm


def original_name(name: str) -> str:
    """The name of a parameter before wrapping.

    Example:
        >>> original_name("module.layers.0._checkpoint_wrapped_module.mlp.fc.weight")
        'layers.0.mlp.fc.weight'
    """
    for added in _ADDED:
        name = name.replace(added, "")
    return name.removeprefix("module.")
