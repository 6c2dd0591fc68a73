"""The operators whose outputs activation checkpointing can keep, by torch's names."""

from __future__ import annotations

OPERATORS = {
    "mm": "a linear layer without a bias",
    "addmm": "a linear layer with one",
    "_grouped_mm": "all experts' matmuls in one",
    "scaled_dot_product_attention": "fused attention, whichever of its kernels it is",
}
"""By name in ``torch.ops.aten``, what each is; attention has one name, for which kernel runs is the GPU's affair."""
SDPA_KERNELS = tuple(
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
)
"""In ``torch.ops.aten``."""


def aten_names(operator: str) -> tuple[str, ...]:
    """What one of `OPERATORS` is called in ``torch.ops.aten``."""
    return SDPA_KERNELS if operator == "scaled_dot_product_attention" else (operator,)
