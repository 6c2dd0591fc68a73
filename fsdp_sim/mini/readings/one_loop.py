"""DDP, FSDP, and FSDP with overlap: three training steps of the same stack of layers, which differ in marked lines.

    torchrun --nproc_per_node=2 one_loop.py  # trains with each; needs torch 2.11, nothing else

    ddp         every rank has all parameters. Forward, backward; then the gradients become their mean over the ranks
    fsdp        a rank has a part of each. Before a layer computes it is gathered, afterwards freed; of the mean of the
                gradients a rank gets its part
    overlapped  the next layer is gathered while this one computes, and in backward the gradients of the layer after
                are reduced meanwhile

Lay two of them side by side. From `ddp` to `fsdp` every line that is new or different is one of sharding: the price in
time, for 1/W of the memory. From `fsdp` to `overlapped` no collective is added: they are issued and waited for at other
times, and so the numbers are equal bit by bit. What `fsdp.py` does in hooks is written out here as a loop, one layer
after the other. With 3 layers, wire and processor over time (g gather, r reduce, F forward, B backward):

    ddp         wire                      r2    r1    r0
                cpu  F0    F1    F2    B2    B1    B0
    fsdp        wire  g0    g1    g2       g2    r2 g1    r1 g0    r0
                cpu      F0    F1    F2       B2       B1       B0
    overlapped  wire  g0 g1 g2             g2 g1 r2 g0 r1    r0
                cpu      F0 F1 F2             B2 B1    B0

(torch's DDP overlaps its all-reduces too, in the same way; here it is the plain one, to compare with.)
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

Loss = Callable[[torch.Tensor], torch.Tensor]
"""From the last layer's output to a 0-d loss."""


def ddp(layers: Sequence[Layer], x: torch.Tensor, loss_fn: Loss) -> torch.Tensor:
    """Forward and backward; the gradients are in the layers' ``param.grad``. Returns the loss of this rank."""
    n = len(layers)
    for i in range(n):
        x = layers[i].forward(x)
    loss, grad = loss_and_grad(loss_fn, x)
    for i in reversed(range(n)):
        grad = layers[i].backward(grad)
        layers[i].all_reduce()
        layers[i].wait_for_reduce()
    return loss


def fsdp(layers: Sequence[ShardedLayer], x: torch.Tensor, loss_fn: Loss) -> torch.Tensor:
    """`ddp`, but a layer's parameters have memory only while it computes."""
    n = len(layers)
    for i in range(n):
        layers[i].gather()  # <--
        layers[i].wait_for_gather()  # <--
        x = layers[i].forward(x)
        layers[i].free()  # <--
    loss, grad = loss_and_grad(loss_fn, x)
    for i in reversed(range(n)):
        layers[i].gather()  # <-- again: they were freed
        layers[i].wait_for_gather()  # <--
        grad = layers[i].backward(grad)
        layers[i].free()  # <--
        layers[i].reduce_scatter()  # <-- of the mean, this rank's part
        layers[i].wait_for_reduce()
    return loss


def overlapped(layers: Sequence[ShardedLayer], x: torch.Tensor, loss_fn: Loss) -> torch.Tensor:
    """`fsdp`, but what travels does so beside a layer that computes. One more layer has memory."""
    n = len(layers)
    layers[0].gather()  # <-- nothing runs beside the first one
    for i in range(n):
        layers[i].wait_for_gather()
        if i + 1 < n:  # <--
            layers[i + 1].gather()  # <-- before the forward that it travels beside
        x = layers[i].forward(x)
        layers[i].free()
    loss, grad = loss_and_grad(loss_fn, x)
    layers[-1].gather()  # <--
    for i in reversed(range(n)):
        layers[i].wait_for_gather()
        if i > 0:  # <--
            layers[i - 1].gather()  # <-- before the backward that it travels beside
        grad = layers[i].backward(grad)
        layers[i].free()
        if i + 1 < n:  # <--
            layers[i + 1].wait_for_reduce()  # <-- one layer later: it travelled beside this backward
        layers[i].reduce_scatter()
    layers[0].wait_for_reduce()  # <-- nothing runs beside the last one
    return loss


def loss_and_grad(loss_fn: Loss, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The loss, and its gradient with respect to the last layer's output."""
    output.requires_grad_()
    loss = loss_fn(output)
    (grad,) = torch.autograd.grad(loss, output)
    return loss.detach(), grad


# What can be asked of a layer. Nothing happens by itself: a collective is issued here, and waited for there. In between
# gloo's threads carry it out, or NCCL on a stream of its own; there `wait` lets the GPU wait, and the CPU runs on.


class Layer:
    """A layer of which every rank has all.

    Args:
        module: from one tensor to one tensor. Its parameters become views of ``whole``.

    Attributes:
        whole: 1D, W * n: the parameters one after the other, and padding, so that W parts of n are equal.
        param: what the optimizer changes: ``whole``.

    Raises:
        ValueError: the parameters differ in dtype, or there are none.

    Example::

        layers = [ShardedLayer(module) for module in modules]
        optimizer = torch.optim.AdamW([layer.param for layer in layers])
        loss = overlapped(layers, x, lambda output: F.mse_loss(output, y))
        optimizer.step()
        optimizer.zero_grad()
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.params = module, list(module.parameters())
        if len(dtypes := {p.dtype for p in self.params}) != 1:
            raise ValueError(
                f"a layer must have parameters of one dtype, but {type(module).__name__} has {dtypes or 'none'}"
            )
        flat = torch.cat([p.detach().flatten() for p in self.params])  # 1D
        self.whole = F.pad(flat, (0, -len(flat) % dist.get_world_size()))
        for param, view in zip(self.params, self.split(self.whole), strict=True):
            param.data = view
        self.param = nn.Parameter(self.whole)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """What belongs to each parameter in a buffer of W * n elements: views of their shapes."""
        starts = accumulate((p.numel() for p in self.params), initial=0)
        return [flat[i : i + p.numel()].view(p.shape) for i, p in zip(starts, self.params, strict=False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From input to output. Autograd's graph spans one layer: it begins and ends here."""
        self.input = x.detach().requires_grad_(x.is_floating_point())
        self.output = self.module(self.input)
        return self.output.detach()

    def backward(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        """From the gradient of the output to that of the input; those of the parameters are in their ``.grad``."""
        self.output.backward(grad)
        grad = self.input.grad
        del self.input, self.output
        return grad

    def take_grads(self) -> torch.Tensor:
        """What backward has found, 1D: W * n."""
        flat = torch.zeros_like(self.whole)
        for param, part in zip(self.params, self.split(flat), strict=True):
            if param.grad is not None:
                part.copy_(param.grad)
            param.grad = None
        return flat

    def all_reduce(self) -> None:
        """Issue the all-reduce of the gradients."""
        self.mean = self.take_grads()
        self.reducing = dist.all_reduce(self.mean, dist.ReduceOp.AVG, async_op=True)

    def wait_for_reduce(self) -> None:
        """Afterwards the mean over the ranks is in ``param.grad``, added to what was there."""
        self.reducing.wait()
        self.param.grad = self.mean if self.param.grad is None else self.param.grad + self.mean
        del self.mean


class ShardedLayer(Layer):
    """A layer of which every rank has a part.

    Attributes:
        whole: has memory from `gather` to `free`.
        param: 1D, n: this rank's part, for the optimizer.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.param = nn.Parameter(self.own_part().clone())
        self.free()

    def own_part(self) -> torch.Tensor:
        return self.whole.chunk(dist.get_world_size())[dist.get_rank()]

    @torch.no_grad()
    def gather(self) -> None:
        """Give the parameters memory and issue their all-gather."""
        self.whole.untyped_storage().resize_(self.whole.nbytes)
        own = self.own_part()
        own.copy_(self.param)
        self.gathering = dist.all_gather_into_tensor(self.whole, own, async_op=True)

    def wait_for_gather(self) -> None:
        self.gathering.wait()

    def free(self) -> None:
        """Take the parameters' memory away. What autograd saved of them is there again after the next `gather`."""
        self.whole.untyped_storage().resize_(0)

    def reduce_scatter(self) -> None:
        """Issue the reduce-scatter of the gradients."""
        self.mean = torch.empty_like(self.param)  # 1D: n
        self.grads = self.take_grads()  # must live until it is over
        self.reducing = dist.reduce_scatter_tensor(self.mean, self.grads, dist.ReduceOp.AVG, async_op=True)

    def wait_for_reduce(self) -> None:
        super().wait_for_reduce()
        del self.grads


TWINS: dict[str, tuple[Callable[..., torch.Tensor], type[Layer]]] = {
    "ddp": (ddp, Layer),
    "fsdp": (fsdp, ShardedLayer),
    "overlapped": (overlapped, ShardedLayer),
}
"""A training step, and the layers that it is for."""


def main() -> None:
    """Train the same layers with each of the three."""
    warnings.simplefilter("ignore", FutureWarning)  # the collectives have newer names in torch 2.13
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    losses: dict[str, list[float]] = {}
    for name, (step, make) in TWINS.items():
        torch.manual_seed(0)  # the same parameters on every rank and for every twin
        modules = [nn.Sequential(nn.Linear(width, width + 3), nn.Tanh()) for width in (7, 10, 13)]
        layers = [make(module.to(device)) for module in modules]
        optimizer = torch.optim.AdamW([layer.param for layer in layers], lr=1e-2)
        torch.manual_seed(1 + dist.get_rank())  # each rank has other data
        x, y = torch.randn(32, 7, device=device), torch.rand(32, 16, device=device)
        losses[name] = []
        for _ in range(5):
            loss = step(layers, x, partial(F.mse_loss, target=y))
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(loss, dist.ReduceOp.AVG)
            losses[name].append(loss.item())
        if dist.get_rank() == 0:
            print(f"{name:12}" + "".join(f"{loss:12.8f}" for loss in losses[name]))
    assert losses["overlapped"] == losses["fsdp"]
    torch.testing.assert_close(losses["fsdp"], losses["ddp"], rtol=1e-6, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
