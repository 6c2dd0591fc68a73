"""SHARD_GRAD_OP keeps the parameters replicated: true or false?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, OUT = 4, 4


def parameters_between_passes(width, reshard_after_forward):
    model = nn.Linear(width, 4, bias=False)
    fully_shard(model, reshard_after_forward=reshard_after_forward)

    def here():
        weight = model.weight
        return (weight.to_local() if isinstance(weight, DTensor) else weight).numel()

    before = here()
    loss = model(torch.randn(2, width)).sum()
    between = here()
    loss.backward()
    return {"before": before, "between": between, "after": here(), "replicated": before == 4 * width}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    width = int(torch.randint(100, 999, (1,), generator=draw))
    keep = bool(torch.randint(2, (1,), generator=draw))
    return [(width, keep)] * RANKS


def other_setting(seed: int) -> Inputs:
    """Who forgets to pass the setting on is right with one of the two."""
    width, keep = inputs(seed)[0]
    return [(width + 7, not keep)] * RANKS


def held(inputs: Inputs, **other: Any) -> list[dict[str, Any]]:
    """What the setting says: kept whole from forward to the end of backward, or freed; a shard otherwise."""
    width, reshard = inputs[0]
    shard, whole = torch.empty(OUT, width, device="meta").chunk(RANKS)[0].numel(), OUT * width
    found = {"before": shard, "between": shard if reshard else whole, "after": shard, "replicated": False}
    return [found | {name: whole if value == "whole" else value for name, value in other.items()}] * RANKS


def always_whole(width, reshard_after_forward):
    return {"before": OUT * width, "between": OUT * width, "after": OUT * width, "replicated": True}


def always_freed(width, reshard_after_forward):
    return {"before": width, "between": width, "after": width, "replicated": False}


def always_kept(width, reshard_after_forward):
    return {"before": width, "between": OUT * width, "after": width, "replicated": False}


EXERCISE = Exercise(
    title="Settle whether SHARD_GRAD_OP replicates parameters",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=4,
    minutes=10,
    contract='"SHARD_GRAD_OP (ZeRO-2) keeps parameters replicated and shards gradients and optimizer state." FSDP2 has '
    "it as reshard_after_forward=False; True is FULL_SHARD. On 4 ranks shard nn.Linear(width, 4, bias=False) with the "
    "given setting, and count the numbers of its weight that are in this rank's memory before forward, between forward "
    "and backward, and after backward. Return a dict with before, between, after, and replicated: whether the rank "
    "held the whole weight before forward.",
    reference=parameters_between_passes,
    why="Both settings keep a shard between steps: that is where the optimizer works. They differ only from the end of "
    "forward to backward, where False keeps the whole weights, so that backward need not gather. For a model of 8 "
    "billion parameters in bf16 these are 16 GB at the peak: fewer gathers for more memory, and nothing is replicated.",
    hints=(
        "Replicated would mean whole on every rank, always. At which moments does this rank have all numbers?",
        "A DTensor's numel is that of the whole; its local tensor's is what is here. A gathered weight is no DTensor.",
        "Look at model.weight three times: if it is a DTensor take to_local(), else the tensor itself; count numel().",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=held,
        again=other_setting,
        causes=(
            (
                lambda inputs: held(inputs, before="whole", between="whole", after="whole", replicated=True),
                "a DTensor's numel is that of the whole; in this rank's memory is to_local()",
            ),
            (
                lambda inputs: held(inputs, replicated=True),
                "the numbers are right, and before forward the rank holds a quarter: nothing is replicated",
            ),
            (
                lambda inputs: held(inputs, after="whole"),
                "after backward the weight is freed: from then on the optimizer works on the shard",
            ),
            (
                lambda inputs: held(inputs, between=inputs[0][0]),
                "with False the weight stays whole after forward, until backward has used it",
            ),
            (
                lambda inputs: held(inputs, between="whole"),
                "with True the weight is freed after forward, and gathered again in backward",
            ),
        ),
    ),
    wrong=(
        Wrong(always_whole, "a DTensor's numel is that of the whole"),
        Wrong(always_freed, "with False the weight stays whole after forward"),
        mutant(
            {"model, reshard_after_forward=reshard_after_forward": "model"},
            "with True the weight is freed after forward",
            name="forgets the setting",
        ),
        mutant({"before == 4 * width": "True"}, "nothing is replicated", name="believed"),
        mutant({'"after": here()': '"after": 4 * width'}, "after backward the weight is freed", name="stays whole"),
        mutant(
            {"(weight.to_local() if isinstance(weight, DTensor) else weight).numel()": "weight.numel()"},
            "a DTensor's numel is that of the whole",
            name="counts the shape",
        ),
    ),
    shortcuts=(
        Wrong(lambda width, reshard_after_forward: {"replicated": False}, "there is no 'before'"),
        Wrong(
            lambda width, reshard_after_forward: (always_kept if reshard_after_forward else always_freed)(width, None),
            "expected",
        ),
    ),
    covers=("coverage 002.10", "coverage 002.9", "coverage 004.128", "coverage 003.7"),
)
