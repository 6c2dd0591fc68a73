"""Where autograd tells FSDP how far backward is: a node on a unit's inputs, a hook on its outputs.

    outputs   their gradient is computed before the unit's backward: the hook runs `pre_backward`
    inputs    their gradient is computed by the unit's backward, last of all: the node runs `post_backward`

Inputs and outputs may be nested in lists, dicts, named tuples and dataclasses.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.utils import _apply_to_tensors

if TYPE_CHECKING:
    from fsdp_sim.mini.group import FSDPParamGroup


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward runs once their gradients are known: the unit's own is done."""

    @staticmethod
    def forward(ctx: Any, group: FSDPParamGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.group.post_backward()
        return (None, *grads)


def register_post_backward(group: FSDPParamGroup, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a forward, with the node on all tensors that need a gradient.

    If none does, no gradient flows to the inputs, and the final callback runs ``post_backward``.
    """
    inputs = grad_tensors((args, kwargs)) if torch.is_grad_enabled() else []
    if not inputs:
        return args, kwargs
    outputs = deque(RegisterPostBackwardFunction.apply(group, *inputs))
    return _apply_to_tensors(lambda t: outputs.popleft() if t.requires_grad else t, (args, kwargs))


def register_pre_backward(output: Any, hook: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    """Put the hook on all tensors of an output that need a gradient."""
    if not torch.is_grad_enabled():
        return
    for tensor in grad_tensors(output):
        if tensor._base is not None:
            warnings.warn(
                f"{name} returned a view. An in-place operation on it (x += y) would silently drop the hook that "
                "gathers the parameters in backward; use x = x + y, or return .clone()",
                stacklevel=2,
            )
        tensor.register_hook(hook)


def grad_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient in nested containers and dataclasses, in a fixed order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    _apply_to_tensors(keep, tree)
    tensors = found.copy()
    found.clear()  # `_apply_to_tensors` leaves `keep` and all it refers to in a cycle, for the garbage collector
    return tensors


def in_backward() -> bool:
    """Whether autograd is running: a forward inside is a recomputation of activation checkpointing."""
    return torch._C._current_graph_task_id() != -1
