"""A model and its inputs without memory: every tensor a fake one, in the dtype that FSDP computes in."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


def fake_model(build: Callable[[], nn.Module] | nn.Module, mode: FakeTensorMode) -> nn.Module:
    """The model with fake parameters and buffers on the CPU, whatever device it was built on.

    Args:
        build: makes the model; called under ``mode``, so that nothing is allocated, or if it needs values of tensors,
            with real tensors and each parameter let go as soon as it is registered. Or a module: it is copied
            without its weights and stays as it is.

    Raises:
        TypeError: ``build`` is neither, or returns something else.
    """
    if not isinstance(build, nn.Module):
        if not callable(build):
            raise TypeError(
                f"build is a {type(build).__name__}; pass a function that returns an nn.Module, for example "
                f"lambda: GPT(config)"
            )
        try:
            with mode, _conversions():
                built = build()
        except (
            DataDependentOutputException
        ):  # it asks for values, as of torch.linspace(...).tolist(): give it real ones
            with _parameters_on_meta():
                built = build()
        if not isinstance(built, nn.Module):
            raise TypeError(f"build returned a {type(built).__name__}; it must return an nn.Module")
        build = built
    memo: dict[int, Any] = {}
    for module in build.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _fake_like(tensor, mode)
    with mode:
        return copy.deepcopy(build, memo)


def fake_inputs(example_inputs: Any, mode: FakeTensorMode) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with every tensor in them replaced by a fake one.

    Args:
        example_inputs: a tensor; a tuple or list of positional arguments; a mapping of keyword arguments; or a
            function, called under ``mode``, that returns one of these.
    """
    if callable(example_inputs) and not isinstance(example_inputs, (torch.Tensor, Mapping)):
        with mode:
            example_inputs = example_inputs()
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        kwargs = dict(example_inputs)
    elif isinstance(example_inputs, (tuple, list)):
        args = tuple(example_inputs)
    else:
        args = (example_inputs,)
    return tree_map_only(torch.Tensor, lambda tensor: _fake_like(tensor, mode), (args, kwargs))


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """What the all-gather hands to compute: every floating-point parameter in ``dtype``; buffers stay as they are."""
    cast: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param.is_floating_point() and param.dtype != dtype:
                if id(param) not in cast:
                    cast[id(param)] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
                module._parameters[name] = cast[id(param)]


@contextmanager
def _conversions() -> Iterator[None]:
    """``model.to(torch.bfloat16)`` registers new parameters, tied ones once: torch swaps fake ones in place, and cannot
    while anything refers to them weakly."""
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the old one, which is kept so that its id is its own

    def apply(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in module.children() if recurse else ():
            child._apply(fn)
        for name, param in module._parameters.items():
            if param is not None:
                if id(param) not in made:
                    with torch.no_grad():
                        made[id(param)] = (param, nn.Parameter(fn(param), param.requires_grad))
                module._parameters[name] = made[id(param)][1]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else fn(buffer)
        return module

    with patch.object(nn.Module, "_apply", apply):
        yield


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory when they are registered, before they are initialised (as in Hugging Face's
    ``init_empty_weights``)."""
    register = nn.Module.register_parameter
    made = WeakIdKeyDictionary()  # by the real one, which may be registered again: tied

    def registered(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:
            if param not in made:
                made[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            module._parameters[name] = made[param]

    with patch.object(nn.Module, "register_parameter", registered):
        yield


def _fake_like(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    with mode, torch.no_grad():
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)
