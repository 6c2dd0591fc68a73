"""Where autograd tells FSDP how far backward is: a node on a unit's inputs, a hook on its outputs.

    outputs   their gradient is computed before the unit's backward: the hook runs `pre_backward`
    inputs    their gradient is computed by the unit's backward, last of all: the node runs `post_backward`

Inputs and outputs may be nested in lists, dicts, named tuples and dataclasses.

[Note: torch.func]  The transforms of `torch.func` (grad, vjp, jvp, jacrev) wrap every tensor that is made inside them,
and the wrappers are dead outside. So what outlives the forward, the unsharded parameters above all, is made
`outside_functorch`, and the autograd functions have what a transform asks of them: a ``setup_context`` and a ``jvp``.
"""

from __future__ import annotations

import functools
import warnings
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _apply_to_tensors

if TYPE_CHECKING:
    from fsdp_sim.mini.group import FSDPParamGroup


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward runs once their gradients are known: the unit's own is done."""

    generate_vmap_rule = True

    @staticmethod
    def forward(group: FSDPParamGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return inputs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.group.post_backward()
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tangents


class RegisterPreBackwardFunction(torch.autograd.Function):
    """The identity on an output inside `torch.func`, where a tensor may not say that it needs a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(hook: Callable[[torch.Tensor], torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.hook = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.hook(grad)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else RegisterPreBackwardFunction.apply(ctx.hook, tangent)


def register_post_backward(group: FSDPParamGroup, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a forward, with the node on all tensors that need a gradient.

    If none does, no gradient flows to the inputs, and the final callback runs ``post_backward``.
    """
    inputs = grad_tensors((args, kwargs)) if torch.is_grad_enabled() else []
    if not inputs:
        return args, kwargs
    outputs = deque(RegisterPostBackwardFunction.apply(group, *inputs))
    return map_grad_tensors(lambda _: outputs.popleft(), (args, kwargs))


def register_pre_backward(output: Any, hook: Callable[[torch.Tensor], torch.Tensor], name: str) -> Any:
    """The output of a forward, with the hook on all its tensors that need a gradient."""
    if not torch.is_grad_enabled():
        return output
    for tensor in grad_tensors(output):
        if tensor._base is not None:
            warnings.warn(
                f"{name} returned a view. An in-place operation on it (x += y) would silently drop the hook that "
                "gathers the parameters in backward; use x = x + y, or return .clone()",
                stacklevel=2,
            )
        tensor.register_hook(hook)
    if not torch._C._are_functorch_transforms_active():
        return output

    def hooked(tensor: torch.Tensor) -> torch.Tensor:
        differentiable = tensor.is_floating_point() or tensor.is_complex()
        if tensor.requires_grad or not differentiable:
            return tensor
        return RegisterPreBackwardFunction.apply(hook, tensor)

    return _apply_to_tensors(hooked, output)


def outside_functorch(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method outside of the transforms of `torch.func`, see [Note: torch.func]."""

    @functools.wraps(method)
    def without_functorch(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return method(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return method(*args, **kwargs)

    return without_functorch


def grad_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient in nested containers and dataclasses, in a fixed order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_grad_tensors(keep, tree)
    return found


def map_grad_tensors(fn: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree with ``fn`` of each tensor that needs a gradient.

    A container in which none changes stays the object it is, as in torch: a forward may append to a list it is given,
    and an output may be of a class that is not made anew so easily.
    """
    old: dict[Any, Any]
    if isinstance(tree, torch.Tensor):
        return fn(tree) if tree.requires_grad else tree
    if data := is_dataclass(tree) and not isinstance(tree, type):
        old = {field.name: getattr(tree, field.name) for field in fields(tree)}
    elif isinstance(tree, (dict, list, tuple)):
        old = dict(tree.items() if isinstance(tree, dict) else enumerate(tree))
    else:
        return tree
    new = {key: map_grad_tensors(fn, value) for key, value in old.items()}
    changed = {key: value for key, value in new.items() if value is not old[key]}
    if data and changed:
        return replace(tree, **changed)
    if isinstance(tree, tuple) and changed:
        try:
            return getattr(tree, "_make", type(tree))(new.values())
        except TypeError:  # a class that takes other arguments than a tuple
            return tuple(new.values())
    if changed:
        tree = copy(tree)
    for key, value in changed.items():
        tree[key] = value
    return tree


def in_backward() -> bool:
    """Whether autograd is running: a forward inside is a recomputation of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
