"""What is done to each block before its parameters are cut: activation checkpointing, then torch.compile.

The order matters. Checkpointing inside the compiled region lets the compiler see what is computed again; sharding
outside both keeps the gathers out of the graph and lets a unit be gathered once for recompute and backward together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_sim.spec import aten_names

_aten = torch.ops.aten
_MATMULS = (_aten.mm.default, _aten.addmm.default)  # a Linear without bias, and with one


def checkpoint_blocks(model: nn.Module, how: str | int | tuple[str, ...] | None) -> None:
    """Let backward compute activations again instead of keeping them, in place.

    On the block as a whole: with a wrapper on each of its children, what lies between them would still be kept.

    Args:
        how: None; ``full`` keeps each block's input, a number k that of every k-th; ``selective`` keeps every other
            matmul and attention too, names of operators (`fsdp_sim.spec.OPERATORS`) what these put out.
    """
    if how is None:
        return
    keep = {"context_fn": _selective} if how == "selective" else {}
    if isinstance(how, tuple):
        keep = {"context_fn": partial(create_selective_checkpoint_contexts, _overloads(how))}
    blocks: Any = model.layers
    every = how if isinstance(how, int) else 1
    for i in range(every - 1, len(blocks), every):
        blocks[i] = checkpoint_wrapper(blocks[i], checkpoint_impl=CheckpointImpl.NO_REENTRANT, **keep)


def _overloads(operators: Iterable[str]) -> list[Any]:
    """What torch dispatches for operators by their names."""
    return [getattr(_aten, name).default for operator in operators for name in aten_names(operator)]


_ATTENTION = _overloads(["scaled_dot_product_attention"])


def compile_blocks(model: nn.Module, backend: str) -> None:
    """``torch.compile`` each block in place, which leaves its name as it is. One block's code serves all of them.

    And what follows the blocks: uncompiled, the logits of a large vocabulary would be written several times in fp32.
    """
    gpt: Any = model
    for block in gpt.layers:
        block.compile(backend=backend)
    gpt.loss = torch.compile(gpt.loss, backend=backend)


def _selective() -> Any:
    """Contexts of one forward and its recompute; each counts its matmuls from 0."""
    return create_selective_checkpoint_contexts(partial(_keep_every_other_matmul, Counter()))


def _keep_every_other_matmul(count: Counter[bool], ctx: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if func in _MATMULS:
        count[ctx.is_recompute] += 1
        keep = count[ctx.is_recompute] % 2 == 1
    else:
        keep = func in _ATTENTION
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
