# mypy: disable-error-code="call-arg, attr-defined, arg-type"
"""A call of FullyShardedDataParallel as it can be found in old guides: one error hides behind the other."""

from __future__ import annotations

import copy
import math
from functools import partial  # noqa: F401 - in edits
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy, transformer_auto_wrap_policy  # noqa: F401 - in edits

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.migration.ddp_step_to_fsdp2 import BLOCKS, RANKS, WIDTH, transformer
from fsdp_sim.learn.judges import Inputs, OnRanks

CPU = torch.device("cpu")


def stub(model, block, rows):
    cpu_offload = CPUOffload(offload_params=False, offload_gradients=False)
    from torch.distributed.fsdp.wrap import default_auto_wrap_policy

    model = FullyShardedDataParallel(
        model,
        fsdp_auto_wrap_policy=default_auto_wrap_policy,
        sharding_strategy="FULL_SHARD",
        cpu_offload=cpu_offload,
        flatten_parameters=True,
        device_id=torch.device("cpu"),
    )
    model(rows).square().mean().backward()
    units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return {"units": units, "norm": model.clip_grad_norm_(math.inf).item()}


def case_21(model, block, rows):
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )
    model(rows).square().mean().backward()
    units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return {"units": units, "norm": model.clip_grad_norm_(math.inf).item()}


def inputs(seed: int) -> Inputs:
    draw, model = torch.Generator().manual_seed(seed), transformer(seed)
    return [
        (copy.deepcopy(model), nn.TransformerEncoderLayer, torch.randn(2, 8, WIDTH, generator=draw))
        for _ in range(RANKS)
    ]


def in_one_process(inputs: Inputs, units: int = BLOCKS + 1) -> list[dict[str, Any]]:
    """The norm of the whole batch's gradients."""
    model = copy.deepcopy(inputs[0][0])
    model(torch.cat([rows for *_, rows in inputs])).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()
    return [{"units": units, "norm": norm}] * RANKS


def with_fsdp2(model, block, rows):
    for layer in model[1:-1]:
        fully_shard(layer)
    fully_shard(model)
    model(rows).square().mean().backward()
    units = sum(isinstance(module, FullyShardedDataParallel) for module in model.modules())
    return {"units": units, "norm": nn.utils.clip_grad_norm_(model.parameters(), math.inf).item()}


def by_heart(model, block, rows):
    return {"units": BLOCKS + 1, "norm": 0.25}


EXERCISE = Exercise(
    title="Mend an FSDP call from an old guide",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=3,
    minutes=15,
    contract="Five lines of this call are from guides older than torch 2. Mend them, and stay with FSDP1: "
    "FullyShardedDataParallel makes each module of the class `block` a unit and the rest the root, all fully sharded, "
    "nothing offloaded, on CPU ranks. The function returns the number of units and the norm of the gradients over all "
    "ranks; leave that as it is.",
    reference=case_21,
    stub=stub,
    why="CPUOffload never had offload_gradients: gradients follow the parameters. default_auto_wrap_policy is called "
    "size_based_auto_wrap_policy since torch 1.12, and would make no unit below 100 million parameters. The argument "
    "is auto_wrap_policy; a policy that needs a class is given by ModuleWrapPolicy or functools.partial. Strategies "
    "are an enum; strings belong to Lightning and Accelerate. flatten_parameters is FairScale's; FSDP1 always does.",
    cause="the arguments are those of other libraries and older versions",
    hints=(
        "Run it, read the error, mend that line, run it again: each error hides the next one.",
        "help(FullyShardedDataParallel) lists the arguments there are. Which class names make a unit, and what takes "
        "a set of classes?",
        "ModuleWrapPolicy with the set of block, ShardingStrategy's FULL_SHARD, and no flatten_parameters or offload.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                lambda inputs: in_one_process(inputs, units=1),
                "there is one unit, the whole model: no policy, or one for modules of 100 million parameters and more",
            ),
            (
                lambda inputs: in_one_process(inputs, units=3 * BLOCKS + 1),
                "a policy by size has made three Linears of each block a unit each: it does not know blocks",
            ),
        ),
        rel=1e-4,
    ),
    wrong=(
        mutant(
            {
                "sharding_strategy=ShardingStrategy.FULL_SHARD": (
                    "cpu_offload=CPUOffload(offload_params=False, offload_gradients=False)"
                )
            },
            "unexpected keyword argument 'offload_gradients'",
            name="offload left",
        ),
        mutant(
            {"model = Fully": "from torch.distributed.fsdp.wrap import default_auto_wrap_policy\n\nmodel = Fully"},
            "cannot import name 'default_auto_wrap_policy'",
            name="import left",
        ),
        mutant(
            {"auto_wrap_policy=": "fsdp_auto_wrap_policy="},
            "unexpected keyword argument 'fsdp_auto_wrap_policy'",
            name="argument left",
        ),
        mutant(
            {"ModuleWrapPolicy({block})": "transformer_auto_wrap_policy"},
            "missing 1 required positional argument: 'transformer_layer_cls'",
            name="policy not partial",
        ),
        mutant({"ShardingStrategy.FULL_SHARD": '"FULL_SHARD"'}, "KeyError: 'FULL_SHARD'", name="string left"),
        mutant(
            {"sharding_strategy=ShardingStrategy.FULL_SHARD": "flatten_parameters=True"},
            "unexpected keyword argument 'flatten_parameters'",
            name="flatten left",
        ),
        mutant(
            {"sharding_strategy=ShardingStrategy.FULL_SHARD": "reshard_after_forward=True"},
            "unexpected keyword argument 'reshard_after_forward'",
            name="fsdp2 argument",
        ),
        mutant(
            {"ModuleWrapPolicy({block})": "size_based_auto_wrap_policy"},
            "there is one unit, the whole model",
            name="renamed only",
        ),
        mutant(
            {"ModuleWrapPolicy({block})": "partial(size_based_auto_wrap_policy, min_num_params=10_000)"},
            "a policy by size has made three Linears",
            name="every linear",
        ),
        mutant(
            {"model.clip_grad_norm_(math.inf)": "nn.utils.clip_grad_norm_(model.parameters(), math.inf)"},
            "norm: expected",
            name="with nn utils",
        ),
    ),
    shortcuts=(
        Wrong(with_fsdp2, "units: expected 4, found 0"),
        Wrong(by_heart, "norm: expected"),
    ),
    covers=(
        "misconception 7",
        "misconception 8",
        "misconception 19",
        "misconception 20",
        "misconception 21",
        "misconception 22",
        "misconception 4.4",
        "misconception 4.5",
        "misconception 4.43",
        "misconception 4.44",
        "misconception 4.86",
        "coverage 004.6",
        "coverage 004.43",
    ),
    stub_says="offload_gradients",
)
