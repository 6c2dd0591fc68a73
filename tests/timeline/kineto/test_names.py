"""Names in traces, as torch 2.11 to 2.13, NCCL and RCCL write them."""

from __future__ import annotations

import pytest

from fsdp_sim.timeline import Op
from fsdp_sim.timeline.kineto.names import Annotation, collective, dtype, is_collective_kernel, is_matmul, mark


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("FSDP::all_gather (layers.3)", Annotation("all_gather", "layers.3")),
        ("FSDP::all_gather", Annotation("all_gather", "root")),
        (
            "FSDP::all_gather (model.layers.3.mlp) [pg=4]",
            Annotation("all_gather", "model.layers.3.mlp"),
        ),  # from 2.12 on
        ("FSDP::all_gather [pg=4]", Annotation("all_gather", "root")),
        ("FSDP::post_backward_rs_wait (layers.0)", Annotation("post_backward_rs_wait", "layers.0")),  # from 2.12 on
        ("FSDP::post_backward_rs_wait ()", Annotation("post_backward_rs_wait", "root")),
        ("FSDP::backward_prefetch for layers.2", Annotation("backward_prefetch", "layers.2")),
        ("FSDP::root_pre_forward", Annotation("root_pre_forward")),
        ("FSDP::all_gather (<b>&)", Annotation("all_gather", "<b>&")),
        ("FullyShardedDataParallel._pre_forward", Annotation("fsdp1:pre_forward")),
        ("ProfilerStep#17", Annotation("step", number=17)),
        ("Optimizer.step#AdamW.step", Annotation("optimizer")),
        ("my own annotation", None),
        ("FSDP", None),
    ],
)
def test_annotations(name: str, meaning: Annotation | None) -> None:
    assert mark(name) == meaning


@pytest.mark.parametrize(
    ("kernel", "op"),
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Op.ALL_GATHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Op.REDUCE_SCATTER),
        ("ncclSymkDevKernel_AllGather_LL(ncclSymkDevWorkArgs4K)", Op.ALL_GATHER),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", Op.ALL_REDUCE),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", Op.BROADCAST),
        ("void vllm::cross_device_reduce(float*)", None),
    ],
)
def test_kernels_of_collectives(kernel: str, op: Op | None) -> None:
    assert is_collective_kernel(kernel) == (op is not None)
    if op is not None:
        assert collective(kernel) is op


def test_a_generic_kernel_is_known_by_the_name_torch_gives_its_collective() -> None:
    kernel = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
    assert is_collective_kernel(kernel)
    assert collective(kernel) is None
    assert collective(kernel, "_reduce_scatter_base") is Op.REDUCE_SCATTER


@pytest.mark.parametrize(
    "kernel",
    ["nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n", "ampere_bf16_s16816gemm",
     "void cutlass::Kernel2<cutlass_80>", "flash_fwd_kernel", "Cijk_Alik_Bljk_BBS_BH", "triton_tem_fused_mm_3"],
)  # fmt: skip
def test_matmuls(kernel: str) -> None:
    assert is_matmul(kernel)
    assert not is_matmul("void at::native::vectorized_elementwise_kernel<4>(int)")


def test_dtypes_of_nccl_and_of_c10() -> None:
    assert [dtype(name) for name in ("BFloat16", "c10::BFloat16", "Float", "float", "Half", "c10::Half")] == [
        ("bf16", 2), ("bf16", 2), ("fp32", 4), ("fp32", 4), ("fp16", 2), ("fp16", 2)
    ]  # fmt: skip
    assert dtype("Float8_e4m3fn") == ("float8_e4m3fn", 1)
    assert dtype("strange") == ("strange", 0)
    assert dtype(None) == ("", 0)
