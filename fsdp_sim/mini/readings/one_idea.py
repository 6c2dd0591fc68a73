"""FSDP as one autograd function: the shortest correct one, and the numerical reference for all others.

All of FSDP's arithmetic is in `Gather`, an all-gather whose backward is a reduce-scatter. Each rank computes with whole
parameters on its part of the batch, so autograd finds on each rank a different gradient of the *same* whole parameters.
A rank owns one part of them. The derivative of "everybody receives my part" is "add up what everybody found out about
my part"; the mean instead of the sum makes it the loss of the whole batch. Autograd does the rest: the order of units,
the accumulation of gradients, modules called twice.

What is left is to let go of the whole parameters after forward. Autograd saves them for backward; a pair of hooks saves
a note instead (where in the gathered buffer a tensor lay), and gathers again when backward reads the first note.

Nothing overlaps: each collective is waited for where it is issued. The hooks of the mini are there to do better.
(Idea: SimpleFSDP, arXiv:2411.00284, where the function is a property of each parameter.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup
from torch.func import functional_call

from fsdp_sim.mini.siblings.collectives import all_gather_whole, default_group, reduce_scatter_mean
from fsdp_sim.timeline import Memory


class Gather(torch.autograd.Function):
    """From a rank's shard, 1D: n, to the whole parameters of its unit, 1D: W * n."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, unit: FSDPUnit) -> torch.Tensor:
        ctx.unit = unit
        return all_gather_whole(shard, unit.group, unit.unit)

    @staticmethod
    def backward(ctx: Any, whole_grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.unit.gathered = None  # all gradients of these parameters are there: backward has read them
        return reduce_scatter_mean(whole_grad, ctx.unit.group, ctx.unit.unit), None


class FSDPUnit(nn.Module):
    """Wraps a module whose parameters are gathered together: they become one, ``shard``, the rank's part of all.

    Args:
        module: its parameters are trained and have one dtype. Those of units inside it are theirs; so wrap inner
            modules first (``model.layers[i] = FSDPUnit(layer)``), the root last.
        process_group: all ranks by default.

    Raises:
        ValueError: the module has no parameters of its own, or not all of one kind.
    """

    parameters_are = Memory.SHARDED  # for `watch`
    shard: nn.Parameter

    def __init__(self, module: nn.Module, process_group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.module, self.group, self.unit = module, default_group(process_group), "root"
        self.gathered: torch.Tensor | None = None  # 1D: W * n, in backward
        inner = {m: name for name, m in module.named_modules() if isinstance(m, FSDPUnit)}
        shards = {unit.shard for unit in inner}
        own = {name: p for name, p in module.named_parameters(remove_duplicate=False) if p not in shards}
        index = {p: i for i, p in enumerate(dict.fromkeys(own.values()))}  # tied ones once
        if len(kinds := {(p.dtype, p.device.type, p.requires_grad) for p in index}) != 1:
            raise ValueError(
                f"a unit needs parameters that are all trained, of one dtype and in memory, but those of "
                f"{type(module).__name__} are (dtype, device, requires_grad): {kinds or 'none'}"
            )
        self.shapes = [p.shape for p in index]
        self.names = {name: index[p] for name, p in own.items()}
        flat = torch.cat([p.detach().flatten() for p in index])  # 1D
        n = -(-flat.numel() // self.group.size())  # elements of a shard: rounded up
        padded = F.pad(flat, (0, n * self.group.size() - flat.numel()))  # 1D: W * n
        self.shard = nn.Parameter(padded[n * self.group.rank() :][:n].clone())  # 1D: n
        for name in own:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._parameters[leaf] = None  # forward puts the gathered one here
        for unit, name in inner.items():
            unit.unit = name.replace("module.", "")

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
                self.gathered = all_gather_whole(self.shard.detach(), self.group, self.unit)
            return self.gathered.as_strided(*saved)

        with saved_tensors_hooks(pack, unpack):
            return functional_call(self.module, self.split(whole), args, kwargs, tie_weights=False)

    def split(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parameters in a gathered buffer, by name and in their own shapes; the padding is left over."""
        numels = [shape.numel() for shape in self.shapes]
        pieces = whole[: sum(numels)].split(numels)
        return {name: pieces[i].view(self.shapes[i]) for name, i in self.names.items()}


def whole_parameters(model: nn.Module, grads: bool = False) -> dict[str, torch.Tensor]:
    """All parameters, or their gradients, by the names they had before, tied ones once. Every rank has to call it."""
    found: dict[str, torch.Tensor] = {}
    for unit in (m for m in model.modules() if isinstance(m, FSDPUnit)):
        if (shard := unit.shard.grad if grads else unit.shard.detach()) is not None:
            prefix = "" if unit.unit == "root" else f"{unit.unit}."
            whole = all_gather_whole(shard, unit.group, unit.unit)
            first_names = {i: name for name, i in reversed(unit.names.items())}.values()
            found |= {f"{prefix}{name}": p for name, p in unit.split(whole).items() if name in first_names}
    return found
