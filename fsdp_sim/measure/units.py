"""From a module to the units that `fully_shard` would make of it."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType

import torch
from torch import nn

from fsdp_sim.schedule import Param, Unit
from fsdp_sim.spec import TORCH_DTYPES
from fsdp_sim.timeline import dtype_name
from fsdp_sim.words import nearest

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, path.split(".")[1]) for name, path in TORCH_DTYPES.items()}


def block_names(model: nn.Module) -> list[str]:
    """The usual wrapping: every module that sits in a ``ModuleList``, by its full name; of lists in it the members."""
    return [
        f"{name}.{index}" if name else index
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, member in module.named_children()
        if not _never_runs(member)
    ]


def _never_runs(module: nn.Module) -> bool:
    """Whether it holds modules and has no forward of its own: `fully_shard` refuses it."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward


def units_from_module(model: nn.Module, wrap: Sequence[str] | None = None) -> list[Unit]:
    """The root unit and one unit per wrapped module, in the order of ``named_modules``.

    Works on the meta device. Tied parameters count once, in the first unit that has them when modules are given to
    `fully_shard` innermost first and else in order, as they must and usually are. Buffers stay whole on every rank.

    Args:
        wrap: full names of the modules given to `fully_shard`, the root left out; by default `block_names`.

    Raises:
        ValueError: a name in ``wrap`` is not a module of the model (the message lists those that are close), is there
            twice or is a container without a forward, or a parameter has a dtype or shape that
            `fsdp_sim.schedule.Param` refuses.

    Example:
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4, bias=False)]), "head": nn.Linear(4, 2)})
        >>> [(unit.name, [param.name for param in unit.params]) for unit in units_from_module(model)]
        [('root', ['head.weight', 'head.bias']), ('layers.0', ['weight'])]
    """
    modules = dict(model.named_modules())
    names = block_names(model) if wrap is None else list(wrap)
    if missing := [name for name in names if name not in modules or not name]:
        there = [name for name in modules if name]
        close = nearest(missing[0], there, most=4) or there[:8]
        raise ValueError(f"wrap names {missing[0]!r}, not a module of {type(model).__name__}; there are {close}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"wrap names {twice[0]!r} twice; fully_shard is applied to a module once")
    if held := [name for name in names if _never_runs(modules[name])]:
        raise ValueError(
            f"wrap names {held[0]!r}, a {type(modules[held[0]]).__name__} without a forward, which fully_shard "
            f"refuses; name the modules in it"
        )
    taken: set[int] = set()
    own = {
        name: (_params(modules[name], taken), _buffer_bytes(modules[name], taken))
        for name in sorted(names, key=_depth, reverse=True)
    }
    first, last = (f"root.{word}" if word in names else word for word in ("embed", "head"))
    segments = (first, ..., last) if names else ("root",)
    root = Unit("root", _params(model, taken), segments, buffer_bytes=_buffer_bytes(model, taken))
    inner = [name for name in modules if name in own]
    return [root, *(Unit(name, own[name][0], _segments(name, names), buffer_bytes=own[name][1]) for name in inner)]


def _depth(name: str) -> int:
    return name.count(".")


def _segments(name: str, names: Sequence[str]) -> tuple[str | EllipsisType, ...]:
    """One piece of compute, or what runs before and after the units inside."""
    inner = any(other.startswith(f"{name}.") for other in names)
    return (f"{name}.embed", ..., f"{name}.head") if inner else (name,)


def _params(module: nn.Module, taken: set[int]) -> tuple[Param, ...]:
    params = []
    for name, param in module.named_parameters():
        if id(param) not in taken:
            taken.add(id(param))
            if not param.dim():
                raise ValueError(
                    f"parameter {name!r} of {type(module).__name__} is a scalar, which fully_shard rejects; make it a "
                    f"tensor of shape (1,)"
                )
            dtype = dtype_name(param.dtype)
            if dtype not in DTYPES:
                what = "complex numbers are" if param.is_complex() else "quantised weights and fp8 are"
                before = "" if param.is_complex() else " before it is quantised,"
                raise ValueError(
                    f"parameter {name!r} of {type(module).__name__} is {param.dtype}: {what} not priced yet; take the "
                    f"model{before} in {', '.join(DTYPES)}"
                )
            params.append(Param(name, tuple(param.shape), dtype, param.requires_grad))
    return tuple(params)


def _buffer_bytes(module: nn.Module, taken: set[int]) -> int:
    """Of the buffers that no unit inside has; what several are views of counts once."""
    total = 0
    for buffer in module.buffers():
        storage = buffer.untyped_storage()
        if storage._cdata not in taken:
            taken.add(storage._cdata)
            total += storage.nbytes()
    return total
