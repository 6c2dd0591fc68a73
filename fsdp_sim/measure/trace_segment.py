"""What a trace collects of one segment, and the small questions it asks of tensors, parameters and graphs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

from fsdp_sim.cost import Kernel, Output
from fsdp_sim.schedule import Unit


@dataclass
class Segment:
    """What was seen of one segment. Bytes are of activations: parameters, buffers and inputs are not counted.

    Attributes:
        forward, backward: kernels in order, equal neighbours merged.
        forward_peak_bytes, backward_peak_bytes: the most alive, of all segments, while this one ran; in backward with
            the whole gradients of this segment's parameters.
        saved_bytes: made by this segment and alive when backward starts.
        input_bytes, output_bytes: of the tensors that enter its unit, and no unit before, and that leave it.
        grad_bytes: of the whole gradients that are first made here.
        outputs: of the operators that activation checkpointing may keep.
        loss_bytes: of ``saved_bytes``, outputs of the loss's kernels.
        last: when it last ran in forward.
        made_by: of each of the ``outputs`` the storages.
    """

    forward: list[Kernel] = field(default_factory=list)
    backward: list[Kernel] = field(default_factory=list)
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    grad_bytes: int = 0
    outputs: list[Output] = field(default_factory=list)
    loss_bytes: int = 0
    last: int = 0
    made_by: list[list[weakref.ref[Any]]] = field(default_factory=list)


def tensors_anywhere(values: Any) -> list[torch.Tensor]:
    """The tensors in nested containers and dataclasses, found as FSDP finds those it hooks; and in sets."""
    if isinstance(values, torch.Tensor):
        return [values]
    inside: Iterable[Any] = ()
    if is_dataclass(values) and not isinstance(values, type):
        inside = [getattr(values, of.name) for of in fields(values)]
    elif isinstance(values, dict):
        inside = values.values()
    elif isinstance(values, (list, tuple, set)):
        inside = values
    return [tensor for value in inside for tensor in tensors_anywhere(value)]


def managed(model: nn.Module, units: Iterable[Unit]) -> Iterator[tuple[tuple[str, str], nn.Parameter]]:
    """Every parameter once, with the names of its unit and its own, as `units_from_module` shares them out."""
    params = {
        name.replace(_CHECKPOINT_PREFIX, ""): param for name, param in model.named_parameters(remove_duplicate=False)
    }
    for unit in units:
        prefix = "" if unit.name == "root" else f"{unit.name}."
        for param in unit.params:
            yield (unit.name, param.name), params[prefix + param.name]


def merge(kernels: list[Kernel], new: list[Kernel]) -> None:
    for kernel in new:
        if kernels and kernels[-1]._replace(count=1) == kernel:
            kernels[-1] = kernel._replace(count=kernels[-1].count + 1)
        else:
            kernels.append(kernel)


def ends(root: Any) -> Iterator[tuple[Any, int, Any]]:
    """The nodes of a graph that hand a gradient on to a parameter, which of their results it is, and its node."""
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        for i, (inner, _) in enumerate(node.next_functions):
            if inner is None:
                continue
            if hasattr(inner, "variable"):
                yield node, i, inner
            if inner not in seen:
                seen.add(inner)
                stack.append(inner)
