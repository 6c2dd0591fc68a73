"""Kernels by roofline: never faster than the hardware, slower where the shape is bad."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_sim.cost import Calibration, Kernel
from fsdp_sim.cost.costs import MEASURED
from fsdp_sim.cost.kernels import kernel_s
from fsdp_sim.cost.kernels_of import attention, matmul, pointwise
from fsdp_sim.cost.linears import linear_backward
from fsdp_sim.spec import Block, Model, gpu

A100, H100 = gpu("A100-SXM-80GB"), gpu("H100-SXM-80GB")
NUMBERS = Calibration()
SIZES = st.integers(1, 1 << 15)


@given(SIZES, SIZES, SIZES)
def test_no_matmul_is_faster_than_the_peak_or_the_memory(m: int, n: int, k: int) -> None:
    kernel = matmul(m, n, k, "bf16")

    seconds = kernel_s(kernel, A100, NUMBERS)

    assert seconds >= kernel.flops / A100.peak_flops("bf16")
    assert seconds >= kernel.bytes / A100.mem_bytes_per_s


@given(SIZES, st.integers(1, 1 << 14))
def test_more_work_takes_longer(n: int, more: int) -> None:
    for one, other in (
        (matmul(64, 8 * n, 64, "bf16"), matmul(64, 8 * (n + more), 64, "bf16")),  # what is unaligned takes longer yet
        (pointwise(n, "bf16"), pointwise(n + more, "bf16")),
    ):
        assert kernel_s(one, H100, NUMBERS) < kernel_s(other, H100, NUMBERS)


def test_a_short_inner_dimension_is_slow() -> None:
    def rate(k: int) -> float:
        kernel = matmul(1 << 15, 4096, k, "bf16")
        return kernel.flops / kernel_s(kernel, A100, NUMBERS)

    assert rate(256) < rate(1024) < rate(8192) < A100.matmul_flops("bf16")


@pytest.mark.parametrize(
    ("m", "n", "k", "tflops"),
    [(8192, 8192, 8192, 253.7), (16384, 16384, 16384, 256.5), (6144, 12288, 12288, 250.8), (802816, 192, 768, 157.8)],
)
def test_large_matmuls_take_about_what_was_measured_alone(m: int, n: int, k: int, tflops: float) -> None:
    """cuBLASLt on A100, Azure AI benchmarking guide; training reaches `matmul_fraction` of it."""
    kernel = matmul(m, n, k, "bf16")
    alone = Calibration(matmul_fraction=1.0)

    assert kernel.flops / kernel_s(kernel, A100, alone) / 1e12 == pytest.approx(tflops, rel=0.25)


def test_count_kernels_take_count_times_as_long() -> None:
    one = matmul(512, 512, 512, "bf16")

    assert kernel_s(one._replace(count=7), A100, NUMBERS) == pytest.approx(7 * kernel_s(one, A100, NUMBERS))


def test_compiling_saves_the_bytes_of_what_it_fuses_and_of_nothing_else() -> None:
    def saved(kernel: Kernel) -> bool:
        return kernel_s(kernel, A100, NUMBERS, compiled=True) < kernel_s(kernel, A100, NUMBERS)

    assert saved(pointwise(1e9, "bf16"))
    assert not saved(matmul(4096, 4096, 4096, "bf16"))


def test_attention_by_implementation() -> None:
    model = Model("one", n_layer=1, d_model=2048, n_head=16, d_ffn=1, vocab=1)
    forward, backward = attention(model, 1, 4096, 4096, "bf16", Block())

    def seconds(how: str) -> float:
        return kernel_s(backward, A100, NUMBERS, backward=True, attention=how)

    assert backward.flops == 2.5 * forward.flops
    assert seconds("sdpa") < seconds("flash1") < seconds("math")


@pytest.mark.parametrize(
    ("name", "of_a_matmul"),
    [("MI300X", 0.463), ("B200", 0.262), ("L40S", 0.8), ("RTX-PRO-6000", 0.66), ("H100", 0.463)],
)
def test_attention_comes_as_near_to_a_matmul_as_was_measured_and_else_as_on_an_h100(
    name: str, of_a_matmul: float
) -> None:
    """FlashAttention-2 keeps up with the matmuls of an L40S, not with a B200's (`tests/bench/bench_kernels.py`)."""
    forward, _ = attention(
        Model("one", n_layer=1, d_model=2048, n_head=16, d_ffn=1, vocab=1), 1, 4096, 4096, "bf16", Block()
    )
    part = gpu(name)
    rate = forward.flops / kernel_s(forward, part, NUMBERS)

    assert rate / part.matmul_flops("bf16") == pytest.approx(of_a_matmul, rel=0.02)
    assert rate <= part.sms * NUMBERS.attention_flops_per_sm * 1.01


def test_a_gpu_without_the_dtype_says_so() -> None:
    with pytest.raises(ValueError, match="V100-SXM2-32GB has no bf16"):
        kernel_s(matmul(8, 8, 8, "bf16"), gpu("V100"), NUMBERS)


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_measured_core_is_slow_where_any_dimension_is_short(short: int) -> None:
    core = dataclasses.replace(gpu("cpu"), matmul_ramp=32.0, mem_bytes_per_s=1e15)
    m, n, k = (32 if side == short else 1 << 20 for side in range(3))
    kernel = matmul(m, n, k, "fp32")
    at_peak_s = kernel.flops / core.matmul_flops("fp32")

    assert kernel_s(kernel, core, MEASURED) == pytest.approx(2 * at_peak_s, rel=1e-3)


@pytest.mark.parametrize(("vocab", "slower"), [(50264, 1.0), (50260, 5.5 ** (1 / 3)), (50257, 5.5)])
def test_an_unaligned_vocabulary_slows_the_three_products_of_the_head_unless_a_compiler_pads_it(
    vocab: int, slower: float
) -> None:
    h200, numbers, tokens, d = gpu("H200"), Calibration(), 4099, 768  # how many tokens there are matters to no row
    three = [matmul(tokens, vocab, d, "bf16"), *linear_backward(tokens, vocab, d, "bf16")]

    for kernel in three:
        aligned_s = kernel_s(kernel._replace(row=8), h200, numbers)
        assert kernel_s(kernel, h200, numbers) == pytest.approx(slower * aligned_s)
        assert kernel_s(kernel, h200, numbers, compiled=True) == pytest.approx(aligned_s)


def test_rows_of_fp32_need_no_alignment() -> None:
    kernel = matmul(4096, 50257, 768, "fp32")

    assert kernel_s(kernel, gpu("H200"), Calibration()) == kernel_s(kernel._replace(row=8), gpu("H200"), Calibration())
