"""Dtypes of gather, compute and reduction. Parameters and the optimizer are fp32 in every api.

FSDP's mixed precision and autocast are two ways. FSDP casts a unit's parameters when it gathers them: every op of the
unit runs in ``param_dtype``, norms too, and half the bytes are sent. Autocast, for single and ddp, keeps the parameters
in fp32 and casts the inputs of each op that is known to bear it (matmuls, attention), while norms, softmax and the loss
stay in fp32. The losses of the two agree to the precision of ``param_dtype``, not further.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

from labs.config import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def has_bf16(device: torch.device) -> bool:
    """Whether it computes in bf16. Older NVIDIA GPUs emulate it, and torch says yes of them."""
    if device.type == "cpu" or torch.version.hip:
        return True
    return bool(torch.cuda.get_device_properties(device).major >= 8)


def _cast(name: str | None) -> torch.dtype | None:
    """None for fp32, which is what everything is in already."""
    return None if name in (None, "fp32") else DTYPES[name]


def policy_of(config: TrainConfig) -> MixedPrecisionPolicy | None:
    """fully_shard's; None when all is fp32."""
    if _cast(config.plan.param_dtype) is None and _cast(config.plan.reduce_dtype) is None:
        return None
    return MixedPrecisionPolicy(_cast(config.plan.param_dtype), DTYPES[config.plan.reduce_dtype or "fp32"])


def fsdp1_policy_of(config: TrainConfig) -> MixedPrecision | None:
    """FSDP1's; None when all is fp32."""
    policy = policy_of(config)
    return MixedPrecision(policy.param_dtype, policy.reduce_dtype) if policy else None


def autocast_forward(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """For models whose parameters are not gathered: let every forward run in autocast, in place.

    Around forward only: backward uses the dtypes that forward has chosen.
    """
    dtype = _cast(config.plan.param_dtype)
    if dtype is not None:
        model.forward = torch.autocast(device.type, dtype)(model.forward)


def dtypes_label(config: TrainConfig) -> str:
    param, reduce = str(config.plan.param_dtype), config.plan.reduce_dtype or "fp32"
    if config.api in ("single", "ddp"):
        return param if param == "fp32" else f"autocast {param}"
    return param if reduce == param else f"{param}, reduced in {reduce}"
