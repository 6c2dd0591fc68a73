"""Naive and optimised: three training steps of the same stack of layers, which differ in a few marked lines.

    naive               gather, wait, compute, free; in backward gather, wait, compute, free, reduce, wait
    forward_prefetch    in forward the next layer is gathered while this one computes
    backward_prefetch   in backward too, and a layer's gradients are reduced while the layer before it computes

Lay two of them side by side (`diff`): they do the same work and differ only in *when* a collective is issued and waited
for, so their numbers are equal bit by bit. What the mini does in hooks is written out here as a loop, one layer after
the other. With 3 layers, wire and processor over time (g gather, r reduce, F forward, B backward):

    naive               wire  g0    g1    g2       g2    r2 g1    r1 g0    r0
                        cpu      F0    F1    F2       B2       B1       B0
    forward_prefetch    wire  g0 g1 g2             g2    r2 g1    r1 g0    r0
                        cpu      F0 F1 F2             B2       B1       B0
    backward_prefetch   wire  g0 g1 g2             g2 g1 r2 g0 r1    r0
                        cpu      F0 F1 F2             B2 B1    B0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import ProcessGroup

from fsdp_sim.mini import recording
from fsdp_sim.mini.siblings.collectives import all_gather, default_group, reduce_scatter
from fsdp_sim.timeline import RECORDER, Lane, Memory, Op

Loss = Callable[[torch.Tensor], torch.Tensor]
"""From the last layer's output to a 0-d loss."""


def naive(layers: list[Layer], x: torch.Tensor, loss_fn: Loss) -> torch.Tensor:
    """Forward and backward; the gradients are in the layers' shards. Returns the loss of this rank."""
    begin_forward(layers)
    n = len(layers)
    for i in range(n):
        layers[i].gather()
        layers[i].wait_for_gather()
        x = layers[i].forward(x)
        layers[i].free()
    loss, grad = begin_backward(loss_fn, x)
    for i in reversed(range(n)):
        layers[i].gather()
        layers[i].wait_for_gather()
        grad = layers[i].backward(grad)
        layers[i].free()
        layers[i].reduce()
        layers[i].wait_for_reduce()
    return end_backward(loss)


def forward_prefetch(layers: list[Layer], x: torch.Tensor, loss_fn: Loss) -> torch.Tensor:
    """`naive`, but a layer's forward runs while the next one's parameters travel. One more layer has memory."""
    begin_forward(layers)
    n = len(layers)
    layers[0].gather()  # <-- nothing runs beside the first one
    for i in range(n):
        layers[i].wait_for_gather()
        if i + 1 < n:  # <--
            layers[i + 1].gather()  # <-- before the forward that it travels beside
        x = layers[i].forward(x)
        layers[i].free()
    loss, grad = begin_backward(loss_fn, x)
    for i in reversed(range(n)):
        layers[i].gather()
        layers[i].wait_for_gather()
        grad = layers[i].backward(grad)
        layers[i].free()
        layers[i].reduce()
        layers[i].wait_for_reduce()
    return end_backward(loss)


def backward_prefetch(layers: list[Layer], x: torch.Tensor, loss_fn: Loss) -> torch.Tensor:
    """`forward_prefetch`, but a layer's backward runs while the parameters of the one before it travel, and the
    gradients of the one after it. One more layer has memory, and a second one's gradients."""
    begin_forward(layers)
    n = len(layers)
    layers[0].gather()
    for i in range(n):
        layers[i].wait_for_gather()
        if i + 1 < n:
            layers[i + 1].gather()
        x = layers[i].forward(x)
        layers[i].free()
    loss, grad = begin_backward(loss_fn, x)
    layers[-1].gather()  # <--
    for i in reversed(range(n)):
        layers[i].wait_for_gather()
        if i > 0:  # <--
            layers[i - 1].gather()  # <-- before the backward that it travels beside
        grad = layers[i].backward(grad)
        layers[i].free()
        if i + 1 < n:  # <--
            layers[i + 1].wait_for_reduce()  # <-- one layer later: it travelled beside this backward
        layers[i].reduce()
    layers[0].wait_for_reduce()  # <-- nothing runs beside the last one
    return end_backward(loss)


TWINS = {"naive": naive, "forward_prefetch": forward_prefetch, "backward_prefetch": backward_prefetch}


class Layer:
    """A module cut into shards, and what can be asked of it. Nothing happens by itself.

    Args:
        module: from one tensor to one tensor. Its parameters become views of ``whole``.
        process_group: all ranks by default.

    Attributes:
        whole: 1D, W * n: the parameters; n is their number over W, rounded up. Has memory from `gather` to `free`.
        shard: 1D, n: this rank's part of them, for the optimizer.

    Raises:
        ValueError: the parameters differ in dtype, or there are none.
        RuntimeError: there is no process group.

    Example::

        layers = [Layer(module, f"layers.{i}") for i, module in enumerate(modules)]
        optimizer = torch.optim.AdamW([layer.shard for layer in layers])
        loss = backward_prefetch(layers, x, lambda output: F.mse_loss(output, y))
        optimizer.step()
        optimizer.zero_grad()
    """

    waited_for: ClassVar[int] = -1  # the last collective that this rank has waited for: its seq in the timeline
    recording: ClassVar[int] = 0  # the one into which the shards were written

    def __init__(self, module: nn.Module, name: str, process_group: ProcessGroup | None = None) -> None:
        self.params = list(module.parameters())
        if len({p.dtype for p in self.params}) != 1:
            raise ValueError(f"layer {name!r} must have parameters of one dtype, not {[p.dtype for p in self.params]}")
        self.module, self.name, self.group = module, name, default_group(process_group)
        flat = torch.cat([p.detach().flatten() for p in self.params])  # 1D
        n = -(-flat.numel() // self.group.size())
        self.whole = F.pad(flat, (0, n * self.group.size() - flat.numel()))
        self.shard = nn.Parameter(self._own_part().clone())
        for param, view in zip(self.params, self.split(self.whole), strict=True):
            param.data = view
        self.whole.untyped_storage().resize_(0)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What belongs to each parameter in a buffer of W * n elements: views of their shapes."""
        starts = accumulate((p.numel() for p in self.params), initial=0)
        return [flat[i : i + p.numel()].view(p.shape) for i, p in zip(starts, self.params, strict=False)]

    def _own_part(self) -> torch.Tensor:
        return self.whole.chunk(self.group.size())[self.group.rank()]

    # Parameters

    @torch.no_grad()
    def gather(self) -> None:
        """Give the parameters memory and issue their all-gather."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        recording.allocated(Memory.UNSHARDED, self.name, self.whole.nbytes, Lane.COMPUTE)
        own = self._own_part()
        own.copy_(self.shard)
        self.gathering = all_gather(self.whole, own, self.group, self.name, Layer.waited_for)

    def wait_for_gather(self) -> None:
        self.gathering.wait()
        Layer.waited_for = self.gathering.seq

    def free(self) -> None:
        """Take the parameters' memory away. What autograd saved of them is there again after the next `gather`."""
        self.whole.untyped_storage().resize_(0)
        recording.freed(Memory.UNSHARDED, self.name, self.whole.nbytes, Lane.COMPUTE)

    # Compute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From input to output. Autograd's graph spans one layer: it begins and ends here."""
        self.input = x.detach().requires_grad_(x.is_floating_point())
        with RECORDER.span(Op.FWD, self.name, waits_on=(Layer.waited_for,)):
            self.output = self.module(self.input)
        return self.output.detach()

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """From the gradient of the output to that of the input; those of the parameters are in their ``.grad``."""
        with RECORDER.span(Op.BWD, self.name, waits_on=(Layer.waited_for,)):
            self.output.backward(grad)
        recording.allocated(Memory.UNSHARDED_GRAD, self.name, self._grad_bytes(), Lane.COMPUTE)
        grad = self.input.grad
        del self.input, self.output
        return grad

    # Gradients

    def _grad_bytes(self) -> int:
        return sum(p.grad.nbytes for p in self.params if p.grad is not None)

    @torch.no_grad()
    def reduce(self) -> None:
        """Issue the reduce-scatter of the gradients, and drop them."""
        self.whole_grad = torch.zeros_like(self.whole)  # 1D: W * n
        recording.allocated(Memory.RS_INPUT, self.name, self.whole_grad.nbytes, Lane.COMPUTE)
        for param, part in zip(self.params, self.split(self.whole_grad), strict=True):
            if param.grad is not None:
                part.copy_(param.grad)
        recording.freed(Memory.UNSHARDED_GRAD, self.name, self._grad_bytes(), Lane.COMPUTE)
        self.module.zero_grad()
        self.mean = torch.empty_like(self.shard)  # 1D: n
        recording.allocated_storage(Memory.RS_OUTPUT, self.name, self.mean, Lane.REDUCE_SCATTER)
        self.reducing = reduce_scatter(self.mean, self.whole_grad, self.group, self.name, Layer.waited_for)

    @torch.no_grad()
    def wait_for_reduce(self) -> None:
        """Afterwards the mean over the ranks is in ``shard.grad``, added to what was there."""
        self.reducing.wait()
        Layer.waited_for = self.reducing.seq
        self.shard.grad = self.mean if self.shard.grad is None else self.shard.grad + self.mean
        recording.freed(Memory.RS_INPUT, self.name, self.whole_grad.nbytes, Lane.COMPUTE)
        del self.whole_grad, self.mean


# What the twins share: the loss, and where they are in the step, for the timeline


def begin_forward(layers: Iterable[Layer]) -> None:
    recording.install()
    recording.forward_begins(())
    if RECORDER.on and Layer.recording != RECORDER.session:
        Layer.recording, Layer.waited_for = RECORDER.session, -1
        for layer in layers:
            recording.allocated(Memory.SHARDED, layer.name, layer.shard.nbytes, Lane.COMPUTE)


def begin_backward(loss_fn: Loss, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss, and its gradient with respect to the last layer's output."""
    output.requires_grad_()
    loss = loss_fn(output)
    recording.backward_begins()
    (grad,) = torch.autograd.grad(loss, output)
    return loss.detach(), grad


def end_backward(loss: torch.Tensor) -> torch.Tensor:
    recording.backward_ended(Layer.waited_for)
    return loss
