"""Activation checkpointing: what backward computes again, counted in matrix multiplications."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.labs.wrapping.training import SHAPES, wrapped_of


class Calls(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        self.counts["matmul" if "aten.mm." in name or "aten.addmm." in name else name] += 1
        return func(*args, **(kwargs or {}))


def calls(shape: str, how: str) -> tuple[Counter[str], Counter[str]]:
    """Of forward, and of backward."""
    wrapped, _ = wrapped_of(shape, {"api": "single", "activation_checkpointing": how})
    tokens = torch.arange(16)[None]
    with Calls() as forward:
        loss = wrapped.model(tokens, tokens)
    with Calls() as backward:
        loss.backward()
    return forward.counts, backward.counts


@pytest.mark.parametrize("shape", SHAPES)
def test_full_computes_blocks_again_and_selective_every_other_matmul(shape: str) -> None:
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    n_layer = SHAPES[shape].n_layer
    (forward, none), (_, selective), (_, full) = (calls(shape, how) for how in ("none", "selective", "full"))
    in_blocks = forward["matmul"] - 1  # without the head
    per_block = in_blocks // n_layer
    # Backward stops computing a block again when it has what it saved: the last matmul's output is not needed.
    assert full["matmul"] - none["matmul"] == n_layer * (per_block - 1)
    assert selective["matmul"] - none["matmul"] == n_layer * ((per_block - 1) // 2)
    assert full[attention] - none[attention] == n_layer
    assert selective[attention] == none[attention]


@pytest.mark.parametrize("shape", SHAPES)
def test_operators_by_name_are_not_computed_again_and_a_number_is_every_kth_block(shape: str) -> None:
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    (_, none), (_, kept), (_, full), (_, second) = (calls(shape, how) for how in ("none", "mm,addmm", "full", "2"))
    assert kept["matmul"] == none["matmul"]
    assert kept[attention] == full[attention] > none[attention]
    assert second[attention] - none[attention] == SHAPES[shape].n_layer // 2


def test_dropout_is_drawn_once() -> None:
    """The second computation has the first one's random numbers: the gradients are those without checkpointing."""
    import dataclasses

    from labs.model import build
    from labs.wrapping.checkpoint_and_compile import checkpoint_blocks

    config = dataclasses.replace(SHAPES["gpt"], dropout=0.5)
    grads = []
    for how in (None, "full", "selective"):
        model = build(config)
        checkpoint_blocks(model, how)
        torch.manual_seed(7)
        tokens = torch.arange(16)[None]
        model(tokens, tokens).backward()
        grads.append([p.grad for p in model.parameters()])
    for others in grads[1:]:
        torch.testing.assert_close(others, grads[0], rtol=1e-6, atol=0)
