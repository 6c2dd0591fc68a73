"""Does a full state dict get smaller with more ranks?"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS = 4


def bytes_of_a_state_dict(width):
    model = nn.Linear(64, width, bias=False)
    fully_shard(model)
    full: dict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    sharded = model.state_dict()
    full_bytes = full["weight"].nbytes
    sharded_bytes = sharded["weight"].to_local().nbytes
    return {"claim": full_bytes <= sharded_bytes, "full_bytes": full_bytes, "sharded_bytes": sharded_bytes}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    width = RANKS * int(torch.randint(20, 80, (1,), generator=draw)) + 2  # not divisible: the last rank has less
    return [(width,)] * RANKS


def computed(inputs: Inputs) -> list[dict[str, Any]]:
    """From the shape of the weight, as torch.chunk cuts it."""
    weight = torch.empty(inputs[0][0], 64, device="meta")
    parts = [part.nbytes for part in weight.chunk(RANKS)]
    return [{"claim": False, "full_bytes": weight.nbytes, "sharded_bytes": n} for n in parts]


def divided(width):
    full_bytes = 4 * 64 * width
    return {"claim": False, "full_bytes": full_bytes, "sharded_bytes": full_bytes // RANKS}


EXERCISE = Exercise(
    title="Settle whether more ranks make a full state dict smaller",
    kind=ExerciseKind.CLAIM,
    difficulty=2,
    importance=3,
    minutes=10,
    contract='"With more ranks a full state dict takes less memory on each, so it is the way to save large models." On '
    "4 ranks, shard nn.Linear(64, width, bias=False) with fully_shard and take its full state dict (without "
    "cpu_offload) and its sharded one. Return a dict: full_bytes and sharded_bytes, what the tensors of each take on "
    "this rank, and claim, whether a full one takes no more than a sharded one.",
    reference=bytes_of_a_state_dict,
    why="Full means whole tensors in one process: the model's bytes on each rank that keeps them, however many ranks "
    "there are. With cpu_offload it is rank 0's host memory alone, but still the whole model in one place. Sharded "
    "means this rank's rows, about 1/W. And a DTensor tells the bytes of the whole: ask its local tensor.",
    hints=(
        "Which of the two dicts holds plain tensors, and which DTensors? What does a DTensor's shape describe?",
        "Bytes in memory are those of the local tensor; torch.chunk decides how many rows a rank has.",
        "Call get_model_state_dict twice, once with full_state_dict=True; sum nbytes, of DTensors after to_local().",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=computed,
        causes=(
            (
                lambda inputs: [
                    {"claim": True, "full_bytes": right["full_bytes"], "sharded_bytes": right["full_bytes"]}
                    for right in computed(inputs)
                ],
                "nbytes of a DTensor is that of the whole tensor; what this rank keeps is to_local().nbytes",
            ),
            (
                lambda inputs: [
                    right | {"full_bytes": right["full_bytes"] * (rank == 0)}
                    for rank, right in enumerate(computed(inputs))
                ],
                "with cpu_offload only rank 0 gets the dict, and there it is still the whole model",
            ),
            (
                lambda inputs: [right | {"claim": True} for right in computed(inputs)],
                "the bytes are right, and they make the claim false: a full dict is the whole model on any number of "
                "ranks",
            ),
            (
                lambda inputs: [right | {"sharded_bytes": right["full_bytes"] // RANKS} for right in computed(inputs)],
                "the rows cannot be divided evenly: measure what each rank has, the last one has less",
            ),
        ),
    ),
    wrong=(
        mutant({".to_local()": ""}, "nbytes of a DTensor is that of the whole tensor", name="with shape of whole"),
        mutant(
            {
                "full_state_dict=True": "full_state_dict=True, cpu_offload=True",
                'full["weight"].nbytes': "sum(tensor.nbytes for tensor in full.values())",
                "full_bytes <= sharded_bytes": "False",
            },
            "with cpu_offload only rank 0 gets the dict",
            name="offloaded",
        ),
        mutant({"full_bytes <= sharded_bytes": "True"}, "they make the claim false", name="believed"),
        Wrong(divided, "measure what each rank has"),
    ),
    shortcuts=(
        Wrong(lambda width: {"claim": False, "full_bytes": 4 * 64 * 200, "sharded_bytes": 64 * 200}, "expected"),
        Wrong(lambda width: False, "a dict is asked for"),
    ),
    covers=("misconception 29", "pitfall 38", "coverage 004.49", "coverage 001.47"),
)
