"""Which modules and parameters one `fully_shard` call manages: everything below, but what is sharded already.

So the order of the calls makes the units. Bottom up, each layer takes its own parameters and the root what is left;
the root first, and it has taken all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import RegistryItem, _get_registry
from torch.distributed.tensor import Shard
from torch.nn.parameter import UninitializedParameter

from fsdp_sim.mini.state import state_of


def root_modules(modules: list[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules that are not inside another one of the list, each once.

    Raises:
        IndexError: the list is empty (torch's type).
        ValueError: it has a container without a forward.
        AssertionError: `fully_shard`, this or torch's, was applied to one of them before (torch's type).
    """
    inside = {id(sub) for m in modules for sub in m.modules() if sub is not m}
    roots = tuple(m for m in modules if id(m) not in inside)
    if not roots:
        raise IndexError("fully_shard was given no modules; pass a module or a list of modules")
    for module in roots:
        if "fully_shard" in applied_to(module) or roots.count(module) > 1:
            raise AssertionError(
                f"fully_shard has already been applied to this {type(module).__name__}; apply it once to each module"
            )
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard does not support containers that do not implement forward: a {type(module).__name__} "
                "would never gather its parameters; shard the modules in it"
            )
    return roots


def applied_to(module: nn.Module) -> dict[str, RegistryItem]:
    """Which of torch's composable functions were applied to a module: ``fully_shard``, this one too; ``replicate``."""
    return _get_registry(module) or {}


def managed_modules(roots: tuple[nn.Module, ...], ignored: set[nn.Parameter] | None = None) -> list[nn.Module]:
    """The modules and all below, without those that are sharded or replicated already, or of ignored parameters only.

    With ``ignored``, an empty set too, a module without parameters and buffers goes as well, as in torch.
    """
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in found and state_of(module) is None and "replicate" not in applied_to(module):
            for child in module.children():
                visit(child)
            found[module] = None

    for module in roots:
        visit(module)
    if ignored is None:
        return list(found)
    return [m for m in found if any(True for _ in m.buffers()) or any(p not in ignored for p in m.parameters())]


def managed_params(
    managed: list[nn.Module], ignored: set[nn.Parameter], shard_placement_fn: Callable[[nn.Parameter], Any] | None
) -> list[nn.Parameter]:
    """Their parameters, each once.

    Raises:
        RuntimeError: a lazy module that has not seen an input (torch's type).
        ValueError: a scalar parameter, or a ``shard_placement_fn`` that returns no placement.
        NotImplementedError: ``shard_placement_fn`` asks for another dimension than 0, or for another mesh.
    """
    found: dict[nn.Parameter, None] = {}
    for module in managed:
        for name, param in module.named_parameters(recurse=False):
            if param in ignored:
                continue
            if isinstance(param, UninitializedParameter):
                raise RuntimeError(
                    f"{type(module).__name__}.{name} has no shape yet: give the lazy module an input once, then call "
                    "fully_shard"
                )
            if param.ndim == 0:
                raise ValueError(
                    f"fully_shard doesn't support scalar parameters: change {type(module).__name__}.{name} to a 1D "
                    "tensor with numel equal to 1, shape (1,)"
                )
            if shard_placement_fn is not None:
                _validate_placement(shard_placement_fn(param), f"{type(module).__name__}.{name}", param)
            found[param] = None
    return list(found)


def _validate_placement(placement: object, name: str, param: nn.Parameter) -> None:
    if placement is None or placement in (Shard(0), Shard(-param.ndim)):
        return
    error = NotImplementedError if isinstance(placement, Shard) or hasattr(placement, "mesh_info") else ValueError
    raise error(
        f"shard_placement_fn returned {placement!r} for {name} of shape {tuple(param.shape)}; this FSDP shards dim 0 "
        "on the mesh given: return None or Shard(0)"
    )


def move_to_device(params: list[nn.Parameter], managed: list[nn.Module], device: torch.device) -> None:
    """Parameters and buffers; meta tensors stay."""
    buffers = [b for m in managed for b in m.buffers(recurse=False)]
    for tensor in (*params, *buffers):
        if tensor.device.type != "meta" and tensor.device != device:
            tensor.data = tensor.to(device)
