"""The trainer's losses in fp32, in bf16 where that is computed and not emulated, and on GPUs in fp16."""

from __future__ import annotations

import torch

from labs.cluster.torchrun import train
from labs.experiments.result import ResultRow
from labs.wrapping.precision import has_bf16


def losses(ranks: int = 2, steps: int = 10, device: str = "cpu") -> dict[str, list[float]]:
    """The trainer's losses by ``param_dtype``, under torchrun; fp16 on GPUs only.

    Raises:
        FailedError: a run failed.
    """
    return {
        dtype: train(
            f"--param_dtype={dtype}", f"--steps={steps}", "--global_batch=16", ranks=ranks, device=device
        ).losses
        for dtype in dtypes(device)
    }


def dtypes(device: str) -> list[str]:
    if device == "cpu":
        return ["fp32", "bf16"]
    return ["fp32", *(["bf16"] if has_bf16(torch.device("cuda", 0)) else []), "fp16"]


def compare_losses(curves: dict[str, list[float]]) -> list[ResultRow]:
    """The last losses, and how far one is at most from that of fp32."""
    rows = [ResultRow(f"param_dtype={dtype}", "last loss", None, of[-1], "nats") for dtype, of in curves.items()]
    for dtype in [dtype for dtype in curves if dtype != "fp32"]:
        worst = max(abs(a / b - 1) for a, b in zip(curves[dtype], curves["fp32"], strict=True))
        rows.append(ResultRow(f"param_dtype={dtype}", "furthest from fp32's", None, worst, "relative"))
    return rows
