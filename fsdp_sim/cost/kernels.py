"""`kernel_s`: how long a kernel takes on a GPU, by a roofline that depends on the kernel's shape."""

from __future__ import annotations

import math

from fsdp_sim.cost.calibration import Calibration
from fsdp_sim.cost.work import Kernel
from fsdp_sim.spec import DTYPE_BYTES, Gpu

# A matmul whose rows begin at every second byte, over one whose rows begin at multiples of 16, which is what the fast
# loads of tensor cores need (NVIDIA, "Matrix multiplication background user's guide"). Measured in bf16 on an H200 with
# torch 2.11, a head of 50257 against 50264 tokens: 95, 141 and 151 TFLOP/s against 654, 704 and 699 for the three
# products. Rows at multiples of 4 and 8 bytes were not measured: they are taken to lie between, in equal factors.
ALIGNED_BYTES, UNALIGNED = 16, 5.5


def kernel_s(
    kernel: Kernel,
    gpu: Gpu,
    calibration: Calibration,
    *,
    backward: bool = False,
    compiled: bool = False,
    attention: str = "sdpa",
    tf32: bool = False,
) -> float:
    """Seconds of all ``count`` of a kernel.

    The larger of the time to compute and the time to move the bytes (Williams, Waterman, Patterson, "Roofline",
    2009). A matmul's rate ramps with its inner dimension: the start and end of a tile's loop cost a fixed time; on CPU
    cores, whose matrices are small, with all three. That time is fixed: in a dtype that is slower it counts for less.
    Rows that do not begin at multiples of 16 bytes slow tensor cores down, but for a compiler, which pads them
    (inductor's ``shape_padding``).
    With ``tf32`` the products of fp32 numbers are computed in that.
    Attention that is not fused (``math``) is torch's math backend: in fp32 whatever the inputs are
    (``torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp``), for all pairs of tokens, also those that a causal mask
    hides, and the matrix of scores moves five times each way, beside its two matmuls, in backward four.
    """
    if kernel.kind == "attention" and attention == "math" and gpu.fp32_flops is not None:
        kernel = kernel._replace(dtype="fp32")
    if tf32 and kernel.dtype == "fp32" and kernel.kind in ("matmul", "attention"):
        kernel = kernel._replace(dtype="tf32")
    moved = kernel.bytes
    if kernel.fusable:
        moved *= calibration.compiled_bytes if compiled else calibration.eager_bytes
    seconds = moved / (gpu.copy_bytes_per_s * calibration.copy_fraction)
    if kernel.kind == "matmul":
        _, m, n, k = kernel.shape
        rate = gpu.matmul_flops(kernel.dtype) * calibration.matmul_fraction
        ramp = calibration.matmul_ramp_k * _slower(kernel.dtype, gpu) / k + (gpu.matmul_ramp or 0.0) * (
            1 / m + 1 / n + 1 / k
        )
        seconds = max(seconds, kernel.flops / rate * (1.0 + ramp) * (1.0 if compiled else _unaligned(kernel, gpu)))
    elif kernel.kind == "attention":
        seconds = max(seconds, _attention_s(kernel, gpu, calibration, backward, attention))
    return seconds * kernel.count


def _slower(dtype: str, gpu: Gpu) -> float:
    """The rate of a dtype over that of 16 bits, at most 1."""
    return min(1.0, gpu.peak_flops(dtype) / (gpu.bf16_flops or gpu.fp16_flops or gpu.peak_flops(dtype)))


def _unaligned(kernel: Kernel, gpu: Gpu) -> float:
    """How many times as long a matmul takes as one whose rows are aligned."""
    if gpu.arch == "CPU" or not kernel.row or kernel.dtype not in ("bf16", "fp16", "tf32"):
        return 1.0
    at = math.gcd(ALIGNED_BYTES, kernel.row * DTYPE_BYTES.get(kernel.dtype, 4))
    return float(UNALIGNED ** (math.log2(ALIGNED_BYTES / at) / math.log2(ALIGNED_BYTES / 2)))


def _attention_s(kernel: Kernel, gpu: Gpu, calibration: Calibration, backward: bool, attention: str) -> float:
    if attention == "math":
        batch, heads, seq_len, head_dim = kernel.shape
        scores = 1.0 * batch * heads * seq_len * seq_len
        rate = gpu.matmul_flops(kernel.dtype) * calibration.matmul_fraction
        moved_s = 10.0 * scores * DTYPE_BYTES.get(kernel.dtype, 4) / (gpu.copy_bytes_per_s * calibration.copy_fraction)
        return 4.0 * scores * head_dim * (2 if backward else 1) / rate + moved_s
    rate = gpu.attention_flops or gpu.matmul_flops(kernel.dtype) * calibration.attention_fraction(gpu.arch)
    if not (gpu.attention_flops or calibration.knows(gpu.arch)):
        rate = min(rate, gpu.sms * calibration.attention_flops_per_sm)
    if not backward:
        return kernel.flops / rate
    slower = calibration.attention_backward if attention == "sdpa" else calibration.attention_backward_flash1
    return kernel.flops / rate * slower
