"""FSDP as one autograd function: the shortest correct one, and the numerical reference for all others.

    torchrun --nproc_per_node=2 one_idea.py  # trains, and compares with one process; needs torch 2.11, nothing else

All of FSDP's arithmetic is in `Gather`, an all-gather whose backward is a reduce-scatter. Each rank computes with whole
parameters on its part of the batch, so autograd finds on each rank a different gradient of the *same* whole parameters.
A rank owns one part of them. The derivative of "everybody receives my part" is "add up what everybody found out about
my part"; the mean instead of the sum makes it the loss of the whole batch. Autograd does the rest: the order of units,
the accumulation of gradients, modules called twice.

What is left is to let go of the whole parameters after forward. Autograd saves them for backward; a pair of hooks saves
a note instead (where in the gathered buffer a tensor lay), and gathers again when backward reads the first note.

Nothing overlaps: each collective is waited for where it is issued. The hooks of `fsdp.py` are there to do better.
(Idea: SimpleFSDP, arXiv:2411.00284, where the function is a property of each parameter.)
"""

from __future__ import annotations

import copy
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


class Gather(torch.autograd.Function):
    """From a rank's shard, 1D: n, to the whole parameters of its unit, 1D: W * n."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, unit: FSDPUnit) -> torch.Tensor:
        ctx.unit = unit
        return all_gather(shard)

    @staticmethod
    def backward(ctx: Any, whole_grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.unit.gathered = None  # all gradients of these parameters are there: backward has read them
        mean = torch.empty_like(ctx.unit.shard)  # 1D: n
        dist.reduce_scatter_tensor(mean, whole_grad, op=dist.ReduceOp.AVG)
        return mean, None


@torch.no_grad()
def all_gather(shard: torch.Tensor) -> torch.Tensor:
    """All ranks' shards, 1D: n, side by side, 1D: W * n."""
    whole = shard.new_empty(dist.get_world_size() * shard.numel())
    dist.all_gather_into_tensor(whole, shard)
    return whole


class FSDPUnit(nn.Module):
    """Wraps a module whose parameters are gathered together: they become one, ``shard``, the rank's part of all.

    Args:
        module: its parameters are trained and have one dtype. Those of units inside it are theirs; so wrap inner
            modules first (``model.layers[i] = FSDPUnit(layer)``), the root last.

    Raises:
        ValueError: the module has no parameters of its own, or not all of one kind.
    """

    shard: nn.Parameter
    gathered: torch.Tensor | None = None  # 1D: W * n, in backward

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        shards = {m.shard for m in module.modules() if isinstance(m, FSDPUnit)}
        own = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p not in shards}
        index = {p: i for i, p in enumerate(dict.fromkeys(own.values()))}  # tied ones once
        kinds = {(p.dtype, p.device.type) if p.requires_grad else "frozen" for p in index}
        if len(kinds) != 1 or "frozen" in kinds:
            needed = "a unit needs parameters that are all trained, of one dtype and on one device"
            raise ValueError(f"{needed}, but those of {type(module).__name__} are: {kinds or 'none'}")
        self.shapes = [p.shape for p in index]
        self.names = {name: index[p] for name, p in own.items()}
        flat = torch.cat([p.detach().flatten() for p in index])  # 1D
        padded = F.pad(flat, (0, -len(flat) % dist.get_world_size())).view(dist.get_world_size(), -1)  # 2D: W, n
        self.shard = nn.Parameter(padded[dist.get_rank()].clone())  # 1D: n
        for name in own:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = None  # forward puts the gathered one here

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = Gather.apply(self.shard, self)  # 1D: W * n
        address, self.gathered = whole.untyped_storage().data_ptr(), None

        def pack(saved: torch.Tensor) -> Any:
            is_parameter = saved.untyped_storage().data_ptr() == address
            return (saved.shape, saved.stride(), saved.storage_offset()) if is_parameter else saved

        def unpack(saved: Any) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            if self.gathered is None:
                self.gathered = all_gather(self.shard)
            return self.gathered.as_strided(*saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return torch.func.functional_call(self.module, self.split(whole), args, kwargs, tie_weights=False)

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters in a gathered buffer, by name and in their own shapes; the padding is left over."""
        numels = [shape.numel() for shape in self.shapes]
        pieces = whole[: sum(numels)].split(numels)
        return {name: pieces[i].view(self.shapes[i]) for name, i in self.names.items()}


def whole_parameters(model: nn.Module, grads: bool = False) -> dict[str, torch.Tensor]:
    """All parameters, or their gradients, by the names they had before, tied ones once. Every rank has to call it."""
    found: dict[str, torch.Tensor] = {}
    for path, unit in model.named_modules():
        if isinstance(unit, FSDPUnit) and (shard := unit.shard.grad if grads else unit.shard) is not None:
            prefix = "".join(f"{part}." for part in path.split(".") if part not in ("", "module"))
            first_names = {i: name for name, i in reversed(unit.names.items())}.values()
            parameters = unit.split(all_gather(shard))
            found |= {f"{prefix}{name}": p for name, p in parameters.items() if name in first_names}
    return found


def train(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Teach it to add up each row; the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def main() -> None:
    """Train a small model on all ranks, and one with the whole batch on each."""
    warnings.simplefilter("ignore", FutureWarning)  # the collectives have newer names in torch 2.13
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))  # and the process group, and this rank's GPU
    torch.manual_seed(0)  # the same on every rank
    model = nn.Sequential(nn.Linear(7, 10), nn.Tanh(), nn.Linear(10, 13), nn.Tanh(), nn.Linear(13, 1)).to(device)
    x = torch.randn(8 * dist.get_world_size(), 7, device=device)
    expected = train(copy.deepcopy(model), x)

    for i in (0, 2):  # units, inner ones first; the root takes what is left
        model[i] = FSDPUnit(model[i])
    losses = train(FSDPUnit(model), x.chunk(dist.get_world_size())[dist.get_rank()])
    dist.all_reduce(losses, dist.ReduceOp.AVG)
    torch.testing.assert_close(losses, expected)
    if dist.get_rank() == 0:
        for step, pair in enumerate(zip(expected, losses, strict=True)):
            print(f"step {step}   one process {pair[0]:.6f}   {dist.get_world_size()} ranks {pair[1]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
