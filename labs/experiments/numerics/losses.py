"""The trainer's losses in fp32 and in bf16; on GPUs, where it can, in fp16 too."""

from __future__ import annotations

from labs.cluster.torchrun import train
from labs.experiments.result import ResultRow


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
    return ["fp32", "bf16", *(["fp16"] if device == "cuda" else [])]


def compare_losses(curves: dict[str, list[float]]) -> list[ResultRow]:
    """The last losses, and how far one is at most from that of fp32."""
    rows = [ResultRow(f"param_dtype={dtype}", "last loss", None, of[-1], "nats") for dtype, of in curves.items()]
    for dtype in [dtype for dtype in curves if dtype != "fp32"]:
        worst = max(abs(a / b - 1) for a, b in zip(curves[dtype], curves["fp32"], strict=True))
        rows.append(ResultRow(f"param_dtype={dtype}", "furthest from fp32's", None, worst, "relative"))
    return rows
