"""A policy that is a function, given as it is."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy  # noqa: F401 - in edits

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.wrapping import AllGatherCount
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, BLOCKS, WIDTH = 2, 4, 32


class Model(nn.Module):
    """Layers of torch's own transformer, between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(BLOCKS)
        )
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def stub(model, x):
    model = FullyShardedDataParallel(
        model, auto_wrap_policy=transformer_auto_wrap_policy, device_id=torch.device("cpu")
    )
    return model(x).detach()


def case_07(model, x):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer})
    model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=torch.device("cpu"))
    return model(x).detach()


def inputs(seed: int) -> Inputs:
    torch.manual_seed(seed)
    model = Model()
    return [(model, torch.randn(2, 6, WIDTH)) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(x) for model, x in inputs]


def never_wrapped(model, x):
    return model(x).detach()


EXERCISE = Exercise(
    title="Mend a policy that was never told the block",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=10,
    contract="Many guides have this: FSDP1 with auto_wrap_policy=transformer_auto_wrap_policy. Run it, see what "
    "happens, and mend it: each of the four layers (nn.TransformerEncoderLayer) is to be one unit, and the root takes "
    "what is left. Return the output of the forward.",
    reference=case_07,
    stub=stub,
    why="The policy is a function of four arguments. FSDP calls it with three (module, recurse, nonwrapped_numel) and "
    "cannot know the fourth, your block's class: a TypeError. functools.partial fills it in, and ModuleWrapPolicy({the "
    "class}) says the same in fewer words. Name the block alone: every class more is a unit more in each block.",
    cause="the policy is handed over without the argument that only the caller knows",
    hints=(
        "The message names an argument that is missing. Who calls the policy, and what can FSDP not know?",
        "Give FSDP a function to which the missing argument has already been given; do not call it yourself.",
        "functools.partial of the policy with transformer_layer_cls, a set of classes; or ModuleWrapPolicy of the set.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(
            OnlyCollectives(frozenset({"all_gather"}), "a forward needs nothing else"),
            AllGatherCount(
                BLOCKS + 1,
                BLOCKS + 1,
                fewer="a forward gathers each unit once: the layers must be four units, beside the root",
                more="there are more units than the layers and the root: name the class of the layers and no other",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        Wrong(stub, "missing 1 required positional argument: 'transformer_layer_cls'"),
        mutant(
            {"functools.partial(transformer_auto_wrap_policy, ": "transformer_auto_wrap_policy("},
            "missing 3 required positional arguments",
            name="called",
        ),
        mutant(
            {
                (
                    "functools.partial(transformer_auto_wrap_policy, "
                    "transformer_layer_cls={nn.TransformerEncoderLayer})"
                ): "None"
            },
            "the layers must be four units",
        ),
        mutant(
            {
                "transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}": (
                    "size_based_auto_wrap_policy, min_num_params=1_000_000"
                )
            },
            "expected 5 all-gathers, found 1",
        ),
        mutant(
            {
                (
                    "functools.partial(transformer_auto_wrap_policy, "
                    "transformer_layer_cls={nn.TransformerEncoderLayer})"
                ): "ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.LayerNorm})"
            },
            "there are more units than the layers and the root",
        ),
    ),
    shortcuts=(
        Wrong(never_wrapped, "expected 5 all-gathers, found 0"),
        Wrong(lambda model, x: torch.zeros_like(x), "all of it is zero"),
    ),
    covers=("misconception 22", "coverage 000.8", "coverage 001.50", "coverage 002.13", "coverage 004.65"),
    stub_says="missing 1 required positional argument: 'transformer_layer_cls'",
)
