"""`kernel_s`: how long a kernel takes on a GPU, by a roofline that depends on the kernel's shape."""

from __future__ import annotations

from fsdp_sim.cost.calibration import Calibration
from fsdp_sim.cost.work import Kernel
from fsdp_sim.spec import DTYPE_BYTES, Gpu


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
    cores, whose matrices are small, with all three.
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
        rate = gpu.matmul_flops(kernel.dtype) * calibration.of_arch("matmul_fraction", gpu.arch)
        ramp = calibration.matmul_ramp_k / k + (gpu.matmul_ramp or 0.0) * (1 / m + 1 / n + 1 / k)
        seconds = max(seconds, kernel.flops / rate * (1.0 + ramp))
    elif kernel.kind == "attention":
        seconds = max(seconds, _attention_s(kernel, gpu, calibration, backward, attention))
    return seconds * kernel.count


def _attention_s(kernel: Kernel, gpu: Gpu, calibration: Calibration, backward: bool, attention: str) -> float:
    if attention == "math":
        batch, heads, seq_len, head_dim = kernel.shape
        scores = 1.0 * batch * heads * seq_len * seq_len
        rate = gpu.matmul_flops(kernel.dtype) * calibration.of_arch("matmul_fraction", gpu.arch)
        moved_s = 10.0 * scores * DTYPE_BYTES.get(kernel.dtype, 4) / (gpu.copy_bytes_per_s * calibration.copy_fraction)
        return 4.0 * scores * head_dim * (2 if backward else 1) / rate + moved_s
    rate = gpu.attention_flops or gpu.peak_flops(kernel.dtype) * calibration.of_arch("attention_fraction", gpu.arch)
    if not (gpu.attention_flops or calibration.knows(gpu.arch)):
        rate = min(rate, gpu.sms * calibration.attention_flops_per_sm)
    if not backward:
        return kernel.flops / rate
    slower = calibration.attention_backward if attention == "sdpa" else calibration.attention_backward_flash1
    return kernel.flops / rate * slower
