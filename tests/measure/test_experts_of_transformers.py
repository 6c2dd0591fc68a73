"""transformers' models with experts, traced, compute what the dimensions say that their config.json gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from fsdp_sim.cost import Kernel, workload
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.spec import Model, Plan

transformers: Any = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
PLAN = Plan(param_dtype="bf16", reduce_dtype="fp32", micro_batch=2, seq_len=256)
SMALL = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8, "vocab_size": 2000,
    "num_key_value_heads": 4, "use_cache": False,
}  # fmt: skip
MORE = {
    "Mixtral": {"num_local_experts": 8},
    "Qwen3Moe": {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "mlp_only_layers": [0]},
    "DeepseekV3": {
        "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "first_k_dense_replace": 1,
        "num_key_value_heads": 8, "kv_lora_rank": 64, "q_lora_rank": 128, "qk_rope_head_dim": 16, "n_group": 4,
        "qk_nope_head_dim": 48, "v_head_dim": 32, "topk_group": 2,
    },
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 64},
}  # fmt: skip


def flops(kernels: Iterable[Kernel]) -> Counter[str]:
    found: Counter[str] = Counter()
    for kernel in kernels:
        found[kernel.kind] += int(kernel.flops * kernel.count)
    return found


@pytest.mark.parametrize("kind", MORE)
def test_a_traced_model_with_experts_computes_what_its_dimensions_say(kind: str) -> None:
    """GPT-OSS's attention, which is not fused, computes the whole square, where the tables count half of it."""
    of = getattr(transformers, f"{kind}ForCausalLM")
    config = of.config_class(**SMALL | MORE[kind], sliding_window=4096)
    config._attn_implementation = "eager" if kind == "GptOss" else "sdpa"
    config._experts_implementation = "grouped_mm"
    tokens = torch.zeros(2, 256, dtype=torch.long)
    traced = model_from_module(lambda: of(config), {"input_ids": tokens, "labels": tokens}, plan=PLAN, progress=False)
    ours = workload(Model.from_config(config.to_dict()), PLAN)

    for segment, work in ours.work.items():
        if segment.startswith("layers."):
            for kernels, theirs in (
                (work.forward, traced.work[f"model.{segment}"].forward),
                (work.backward, traced.work[f"model.{segment}"].backward),
            ):
                made, seen = flops(kernels), flops(theirs)
                square = 1.6 if kernels is work.backward else 2  # not fused: the scores are not made once more
                attention = made["attention"] * (square if kind == "GptOss" else 1)
                total = seen["matmul"] + seen["attention"]
                assert total == pytest.approx(made["matmul"] + attention, rel=0.01), segment
