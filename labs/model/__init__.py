"""The models that can be trained: sizes of both shapes by name, and how each is built and started."""

from __future__ import annotations

import functools
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_sim.words import nearest
from labs.model import gpt, llama
from labs.model.gpt import GPT, GPTConfig, changed_preset
from labs.model.initial_weights import initial_parameter_
from labs.model.llama import Llama, LlamaConfig

ModelConfig = GPTConfig | LlamaConfig

PRESETS: dict[str, ModelConfig] = {**gpt.PRESETS, **llama.PRESETS}
"""All sizes by name."""


def model_config(name: str, **changes: Any) -> ModelConfig:
    """A size from `PRESETS`, with some fields changed.

    Example:
        >>> model_config("llama-8b", n_layer=2).n_layer
        2

    Raises:
        ValueError: no such preset, no such field (the nearest name is suggested), or a size that cannot be.
    """
    return changed_preset(PRESETS, name, changes)


@overload
def build(config: GPTConfig, seed: int = 0, device: str | torch.device = "cpu") -> GPT: ...
@overload
def build(config: LlamaConfig, seed: int = 0, device: str | torch.device = "cpu") -> Llama: ...
def build(config: ModelConfig, seed: int = 0, device: str | torch.device = "cpu") -> GPT | Llama:
    """The model with the weights that belong to the seed, in fp32: the same on every rank, whatever their number.

    torch's global random numbers stay as they are.
    """
    with torch.device(device):
        return GPT(config, seed) if isinstance(config, GPTConfig) else Llama(config, seed)


def empty(config: ModelConfig) -> GPT | Llama:
    """The model on the meta device: shapes without memory.

    After `to_empty` a tied head has to be tied again, `initial_` gives each parameter its numbers, and the model's
    ``init_buffers`` makes what is in no checkpoint.
    """
    return build(config, device="meta")


@functools.lru_cache(maxsize=8)
def _shapes(config: ModelConfig) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in empty(config).named_parameters(remove_duplicate=False)}


def initial_(model: nn.Module, name: str, whole: torch.Tensor, seed: int) -> None:
    """Fill a whole tensor with the numbers that `build` gives the parameter called ``name``, in place.

    A sharded model is started parameter by parameter: fill a whole tensor, keep this rank's shard, let go of it. The
    numbers do not depend on the sharding. A tied head has the numbers of the token embedding.

    Args:
        model: a `GPT` or `Llama`, sharded or not: its config says what ``name`` is.
        name: as in `empty`'s ``named_parameters``, without what a wrapper adds.
        whole: fp32, of the parameter's shape, on the device whose numbers are wanted.

    Raises:
        ValueError: no parameter of that name, or another shape, as a shard has.
        TypeError: a DTensor (a rank would draw for its shard what belongs to the whole), or not fp32.
    """
    config: Any = model.config
    shapes = _shapes(config)
    if name not in shapes:
        near = nearest(name, shapes) or list(shapes)[:1]
        raise ValueError(f"the model has no parameter {name!r}; names are as in {near[0]!r}, without a wrapper's own")
    if isinstance(whole, DTensor):
        raise TypeError(f"{name} is a DTensor; fill a whole tensor of {tuple(shapes[name])} and keep the shard of it")
    if whole.shape != shapes[name]:
        raise ValueError(f"{name} is {tuple(shapes[name])} in all, and the tensor to fill {tuple(whole.shape)}")
    if name == "head.weight" and config.tied:
        name = "tok_emb.weight"
    initial_parameter_(name, whole, config.n_layer, seed)
