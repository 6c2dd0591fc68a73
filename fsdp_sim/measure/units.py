"""From a module to the units that `fully_shard` would make of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_sim.schedule import Param, Unit

DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


def block_names(model: nn.Module) -> list[str]:
    """The usual wrapping: every module that sits in a ``ModuleList``, by its full name."""
    return [
        f"{name}.{index}" if name else index
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        for index, _ in module.named_children()
    ]


def units_from_module(model: nn.Module, wrap: Sequence[str] | None = None) -> list[Unit]:
    """The root unit and one unit per wrapped module, in the order of ``named_modules``.

    Works on the meta device. Tied parameters count once, in the first unit that has them.

    Args:
        wrap: full names of the modules given to `fully_shard`, the root left out; by default `block_names`.

    Raises:
        ValueError: a name in ``wrap`` is not a module of the model; the message lists those that are close.

    Example:
        >>> model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(4, 4, bias=False)]), "head": nn.Linear(4, 2)})
        >>> [(unit.name, [param.name for param in unit.params]) for unit in units_from_module(model)]
        [('root', ['head.weight', 'head.bias']), ('layers.0', ['weight'])]
    """
    modules = dict(model.named_modules())
    names = block_names(model) if wrap is None else list(wrap)
    if missing := [name for name in names if name not in modules or not name]:
        raise ValueError(f"wrap={missing[0]!r} is not a module of {type(model).__name__}; there are {list(modules)[1:9]}")
    names.sort(key=list(modules).index)
    taken: set[int] = set()
    units = []
    for name in reversed(names):  # the innermost first, as fully_shard is called
        params = _params(modules[name], taken)
        inner = any(other.startswith(f"{name}.") for other in names)
        units.append(Unit(name, params, (f"{name}.embed", ..., f"{name}.head") if inner else (name,)))
    root = Unit("root", _params(model, taken), ("embed", ..., "head") if names else ("root",))
    return [root, *reversed(units)]


def _params(module: nn.Module, taken: set[int]) -> tuple[Param, ...]:
    params = []
    for name, param in module.named_parameters():
        if id(param) not in taken:
            taken.add(id(param))
            params.append(Param(name, tuple(param.shape), DTYPES[param.dtype], param.requires_grad))
    return tuple(params)
