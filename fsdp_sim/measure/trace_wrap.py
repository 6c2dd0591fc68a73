"""Which modules become FSDP units: every way to say it, made into a list of names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from torch import nn

from fsdp_sim.measure.units import block_names

Wrap = str | int | Sequence[str] | Collection[type[nn.Module]] | Callable[..., Any]
"""What `wrap_names` takes."""


def wrap_names(model: nn.Module, wrap: Wrap) -> list[str]:
    """Full names of the modules given to `fully_shard`, the root left out, in the order of ``named_modules``.

    Args:
        wrap: ``"block"``: the members of the outermost ``ModuleList`` s, or, where there are none, the members with
            children of the outermost ``Sequential`` s (convolutional nets). ``"root"``: none. A number: the blocks of
            at least so many parameters, as in `Plan`. A sequence of full names. Classes of modules. A policy of
            ``torch.distributed.fsdp.wrap`` (``ModuleWrapPolicy``, ``CustomPolicy``, or a function of ``(module,
            recurse, nonwrapped_numel)``, such as ``functools.partial(size_based_auto_wrap_policy,
            min_num_params=...)``, which cuts inside of blocks too). Any other callable: asked for each module.

    Raises:
        ValueError: ``wrap`` is none of these, or a policy wraps nothing that is in the model.
    """
    if wrap == "block":
        return _blocks(model)
    if wrap == "root":
        return []
    if isinstance(wrap, int) and not isinstance(wrap, bool) and wrap >= 1:
        sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in _blocks(model)}
        return [name for name, size in sizes.items() if size >= wrap]
    if isinstance(wrap, str) or (isinstance(wrap, int) and not callable(wrap)):
        raise ValueError(
            f"wrap is {wrap!r}; it must be 'block', 'root', a number of parameters >= 1, a tuple of names of modules, "
            f"a set of module classes, a policy of torch.distributed.fsdp.wrap, or a function of a module"
        )
    if isinstance(wrap, Collection):
        given: list[Any] = list(wrap)
        if all(isinstance(one, str) for one in given):
            return given
        if given and all(isinstance(one, type) and issubclass(one, nn.Module) for one in given):
            classes = tuple(given)
            return _chosen(model, lambda module: isinstance(module, classes), f"classes {_names_of(classes)}")
        raise ValueError(f"wrap is {wrap!r}; a collection must hold names of modules or classes of modules")
    if hasattr(wrap, "_run_policy"):  # torch.distributed.fsdp.wrap._Policy
        targets = set(wrap._run_policy(model, set(), {}))
        return _chosen(model, lambda module: module in targets, f"policy {wrap!r}")
    if callable(wrap):
        if "recurse" in _parameters(wrap):
            return _by_policy(model, wrap)
        return _chosen(model, wrap, f"function {getattr(wrap, '__name__', wrap)!r}")
    raise ValueError(f"wrap is {wrap!r}, of type {type(wrap).__name__}; give 'block', a number, names or a policy")


def _blocks(model: nn.Module) -> list[str]:
    names = block_names(model)
    if not names:
        names = [
            f"{name}.{index}" if name else index
            for name, module in model.named_modules()
            if isinstance(module, nn.Sequential)
            for index, member in module.named_children()
            if any(True for _ in member.children())
        ]
    return [name for name in names if not any(name.startswith(f"{outer}.") for outer in names)]


def _chosen(model: nn.Module, choose: Callable[[nn.Module], Any], what: str) -> list[str]:
    names = [name for name, module in model.named_modules() if name and choose(module)]
    if not names:
        kinds = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"wrap ({what}) chooses no module of {type(model).__name__}, which is made of {kinds}")
    return names


def _by_policy(model: nn.Module, policy: Callable[..., bool]) -> list[str]:
    """Walk the modules as FSDP1's ``_recursive_wrap`` does: children first, each parameter counted until wrapped."""
    names: list[str] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> int:
        """Parameters wrapped inside ``module``."""
        numel = sum(p.numel() for p in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return 0
        wrapped = 0
        for child_name, child in module.named_children():
            if child not in seen:
                seen.add(child)
                wrapped += visit(f"{name}.{child_name}" if name else child_name, child)
        if name and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
            names.append(name)
            return numel
        return wrapped

    visit("", model)
    order = [name for name, _ in model.named_modules()]
    return sorted(names, key=order.index)


def _parameters(function: Callable[..., Any]) -> Collection[str]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return ()


def _names_of(classes: Sequence[type]) -> str:
    return ", ".join(one.__name__ for one in classes)
