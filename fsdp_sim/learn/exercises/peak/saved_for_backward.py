"""Are activations sharded? And what does checkpointing leave of them?"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, BLOCKS, WIDTH = 2, 3, 48
WAYS = ("alone", "fsdp", "checkpointed blocks", "checkpointed layers")


class SparseGELU(nn.Module):
    """GELU of the columns that are above zero on average, zeros for the others. What it saves depends on what comes in,
    so no formula knows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        above, y = x.mean(0) > 0, torch.zeros_like(x)
        y[:, above] = functional.gelu(x[:, above])
        return y


def built(hidden: tuple[int, ...], weights: int, how: str) -> nn.Sequential:
    """A block of two linear layers for each hidden width, and a GELU between them."""
    layers: Callable[[nn.Module], nn.Module] = checkpoint_wrapper if how == "checkpointed layers" else lambda m: m
    with torch.random.fork_rng():
        torch.manual_seed(weights)
        blocks = [
            nn.Sequential(layers(nn.Linear(WIDTH, wide)), SparseGELU(), layers(nn.Linear(wide, WIDTH)))
            for wide in hidden
        ]
    return nn.Sequential(*(checkpoint_wrapper(b) if how == "checkpointed blocks" else b for b in blocks))


def sharded(hidden: tuple[int, ...], weights: int, how: str) -> nn.Module:
    """The same; all but the first way sharded."""
    model = built(hidden, weights, how)
    if how != "alone":
        for block in model:
            fully_shard(block)
        fully_shard(model)
    return model


def saved_for_backward(make, x):
    saved = {}
    for how in ("alone", "fsdp", "checkpointed blocks", "checkpointed layers"):
        kept: dict[int, int] = {}

        def note(tensor, kept=kept):
            if len(tensor) == len(x):  # one row for each row of x: an activation, and no weight
                kept[tensor.data_ptr()] = tensor.nbytes
            return tensor

        model = make(how)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            y = model(x)  # noqa: F841  holds what was saved
        saved[how] = sum(kept.values())
    return saved


def inputs(seed: int) -> Inputs:
    rng = random.Random(seed)
    make = functools.partial(sharded, tuple(rng.sample(range(160, 220), BLOCKS)), rng.randrange(2**32))
    return [(make, torch.randn(n, WIDTH, requires_grad=True)) for n in rng.sample(range(50, 90), RANKS)]


def in_one_process(inputs: Inputs) -> list[dict[str, int]]:
    """Counted by hooks, with the models as they are before they are sharded."""
    return [saved_for_backward(functools.partial(built, *make.args), x) for make, x in inputs]


def by_the_widths(make, x):
    """A block's input, the GELU's input and the second layer's, as one would reckon it for a GELU of all columns."""
    hidden = [module.out_features for module in make("alone").modules() if isinstance(module, nn.Linear)][::2]
    of_blocks = sum(WIDTH + 2 * wide for wide in hidden) * len(x) * 4
    return {how: x.nbytes * BLOCKS if how == "checkpointed blocks" else of_blocks for how in WAYS}


def altered(change: Callable[[str, int, dict[str, int]], int]) -> Callable[[Inputs], list[Any]]:
    return lambda inputs: [{how: change(how, n, of) for how, n in of.items()} for of in in_one_process(inputs)]


def divided(how: str, n: int, of: dict[str, int]) -> int:
    return n if how == "alone" else n // RANKS


def no_gain(how: str, n: int, of: dict[str, int]) -> int:
    return of["alone"]


def any_wrapper(how: str, n: int, of: dict[str, int]) -> int:
    return of["checkpointed blocks"] if "checkpointed" in how else n


def weights_too(make, x):
    saved = {}
    for how in WAYS:
        kept: list[Any] = []

        def note(tensor, kept=kept):
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            make(how)(x)
        saved[how] = sum(tensor.nbytes for tensor in kept)
    return saved


EXERCISE = Exercise(
    title="Measure what forward saves for backward",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=30,
    contract="make(how) makes a model of 3 blocks on this rank: 'alone' as it is, the others sharded by fully_shard "
    "over 2 ranks; 'checkpointed blocks' has each block in a checkpoint_wrapper, 'checkpointed layers' each linear "
    "layer. Widths are drawn anew, and between a block's two layers is a GELU of the columns that are above zero on "
    "average: how much it saves depends on x. For each of the four, in this order: 'alone', 'fsdp', 'checkpointed "
    "blocks', 'checkpointed layers', run a forward on x and return, by name, the bytes of activations that autograd "
    "saves (tensors with as many rows as x; count each once). No weight has as many rows.",
    reference=saved_for_backward,
    why="Sharded or alone, a rank saves the same: activations belong to its own rows, and no other rank has use for "
    "them. A checkpoint keeps its input and computes the rest again; so it saves what lies inside it. Around a block "
    "that is nearly everything, about six parts of seven. Around each layer it is nothing, for what autograd saves are "
    "the inputs of layers. If checkpointing saves little, look at what is wrapped.",
    hints=(
        "What does a linear layer need in backward? What does a GELU? And what does a checkpoint keep?",
        "torch.autograd.graph.saved_tensors_hooks(pack, unpack) calls pack(tensor) for each tensor that is saved.",
        "In pack: if len(tensor) == len(x), kept[tensor.data_ptr()] = tensor.nbytes; return tensor. Keep the output.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (altered(divided), "activations are not sharded: a rank saves those of its own rows, all of them"),
            (
                altered(no_gain),
                "a checkpointed block keeps its input alone; did the hooks see the forward of that model?",
            ),
            (altered(any_wrapper), "around one layer a checkpoint keeps what autograd would: that layer's input"),
        ),
    ),
    wrong=(
        mutant(
            {"sum(kept.values())": 'sum(kept.values()) // (1 if how == "alone" else RANKS)'},
            "activations are not sharded",
            name="divided",
        ),
        mutant(
            {"= sum(kept.values())": '= saved.get("alone", sum(kept.values()))'},
            "a checkpointed block keeps its input alone",
            name="no gain",
        ),
        mutant(
            {"make(how)": 'make(how.replace("layers", "blocks"))'},
            "around one layer a checkpoint keeps what autograd would",
            name="any wrapper",
        ),
        Wrong(weights_too, "expected"),
    ),
    shortcuts=(
        Wrong(by_the_widths, "expected"),
        Wrong(lambda make, x: dict.fromkeys(WAYS, 9 * x.nbytes), "expected"),
        Wrong(lambda make, x: dict.fromkeys(WAYS, 0), "expected"),
    ),
    covers=("misconception 12", "pitfall 47", "coverage 002.30", "coverage 000.28"),
)
