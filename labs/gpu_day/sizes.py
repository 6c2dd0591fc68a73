"""Which of the trainer's models have room on the GPUs that are here: the simulator says so before anything is run."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_sim import Cluster, Plan, simulate
from labs.config import TrainConfig
from labs.measure.simulated import gpu_here
from labs.wrapping.precision import has_bf16

LARGEST_FIRST = {
    "gpt2-xl": "gpt2-1.5b", "gpt2-large": "gpt2-774m", "gpt2-medium": "gpt2-350m", "gpt2": "gpt2-124m",
}  # fmt: skip
"""The trainer's models, by the simulator's names for them."""
SMALLEST = "teaching"  # has room everywhere
ROOM = 0.8  # of a GPU's memory for tensors: the rest is the context's, the workspaces' and the allocator's
ROWS = 4  # of a rank


def peak_bytes(model: str, ranks: int, **plan: object) -> int:
    """Predicted for a rank that trains `ROWS` rows of `LARGEST_FIRST`, without checkpointing."""
    asked = Plan(micro_batch=plan.pop("rows", ROWS), seq_len=seq_len(model), **plan)  # type: ignore[arg-type]
    return simulate(
        LARGEST_FIRST[model], Cluster(gpu_here(torch.device("cuda", 0)), gpus=ranks), asked
    ).peak_memory_bytes


def seq_len(model: str) -> int:
    """512 tokens a row, or half of a shorter context."""
    return min(512, TrainConfig(model=model).model_config.context // 2)


def _largest(ranks: int, device: str, **plan: object) -> str:
    if device == "cpu":
        return SMALLEST
    limit_bytes = ROOM * torch.cuda.get_device_properties(0).total_memory  # the driver's; a catalogue has round numbers
    return next((model for model in LARGEST_FIRST if peak_bytes(model, ranks, **plan) < limit_bytes), SMALLEST)


def for_memory_lab(ranks: int, device: str) -> str:
    """The largest model of which lab 2 can train the setting that takes most: twice the rows, nothing sharded."""
    return _largest(ranks, device, rows=2 * ROWS, api="ddp")


def for_training(ranks: int, device: str) -> TrainConfig:
    """A training of the largest model, in bf16 where the GPU has it."""
    bf16 = device == "cuda" and has_bf16(torch.device("cuda", 0))
    model = _largest(ranks, device, param_dtype="bf16" if bf16 else None)
    keys: dict[str, Any] = {"param_dtype": "bf16" if bf16 else "fp32", "seq_len": seq_len(model)}
    return TrainConfig(model=model, device=device, global_batch=ROWS * ranks, **keys)
