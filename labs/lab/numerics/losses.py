"""The trainer's losses in fp32 and in bf16; on GPUs, where it can, in fp16 too."""

from __future__ import annotations

import torch

from labs.lab.result import Row
from labs.place import Place, find_device
from labs.trained import train


def losses(ranks: int = 2, steps: int = 10) -> dict[str, list[float]]:
    """The trainer's losses by ``param_dtype``, under torchrun; fp16 where each rank has a GPU.

    Raises:
        FailedError: a run failed.
    """
    return {
        dtype: train(f"--param_dtype={dtype}", f"--steps={steps}", "--global_batch=16", ranks=ranks).losses
        for dtype in dtypes(device_of(ranks))
    }


def dtypes(device: torch.device) -> list[str]:
    return ["fp32", "bf16", *(["fp16"] if device.type == "cuda" else [])]


def device_of(ranks: int) -> torch.device:
    """Where the trainer runs."""
    return find_device("auto", Place(0, ranks, 0, ranks))


def compare_losses(curves: dict[str, list[float]]) -> list[Row]:
    """The last losses, and how far one is at most from that of fp32."""
    rows = [Row(f"param_dtype={dtype}", "last loss", None, of[-1], "nats") for dtype, of in curves.items()]
    for dtype in [dtype for dtype in curves if dtype != "fp32"]:
        worst = max(abs(a / b - 1) for a, b in zip(curves[dtype], curves["fp32"], strict=True))
        rows.append(Row(f"param_dtype={dtype}", "furthest from fp32's", None, worst, "relative"))
    return rows
