"""LLaMA-Factory's YAML or JSON: transformers' arguments beside its own.

Source: llamafactory 0.9.5, ``hparams``; `model.adapter.init_adapter` (what is trained becomes fp32),
`model.model_utils.checkpointing.prepare_model_for_training` (blocks are computed again by default),
`model.model_utils.quantization.configure_quantization`.
"""

from __future__ import annotations

from fsdp_sim.configurations.adapters import lora_plan
from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.loaded import chunked_loss, dims_of, of_preferences
from fsdp_sim.configurations.said import Asked, Said
from fsdp_sim.configurations.trainer import plan_of_arguments, say_who_shards


def read(keys: Keys, asked: Asked) -> Said:
    said = Said(model=keys["model_name_or_path"])
    plan = plan_of_arguments(keys, asked, {}, checkpoints=not keys["disable_gradient_checkpointing"])
    plan["seq_len"] = keys["cutoff_len"]
    if plan["api"] == "fsdp1" and plan.get("activation_checkpointing"):
        plan["use_reentrant"] = keys["use_reentrant_gc"]
    if keys["stage"] in ("dpo", "kto"):
        of_preferences(keys, plan, pairs=keys["stage"] == "dpo")
    if keys["use_muon"]:
        plan["optimizer"] = "muon"
    if keys["flash_attn"] == "disabled":
        plan["attention_impl"] = "math"
    if keys["enable_liger_kernel"]:
        plan |= {"rms_norm": "fused"} | chunked_loss(
            keys, "enable_liger_kernel", asked.given.get("seq_len", plan["seq_len"])
        )
    bits = keys["quantization_bit"]
    if keys["finetuning_type"] == "lora":
        plan |= lora_plan(keys, keys["lora_rank"], keys["lora_target"], "lora_target")
        if bits:
            plan["base_quantization"] = keys["quantization_type"] + "_double_quant" * keys["double_quantization"]
    elif bits:
        raise keys.wrong("quantization_bit", bits, "left out", "weights of four bits are trained by LoRA alone")
    if keys["upcast_layernorm"]:
        keys.remarks.append(f"upcast_layernorm of {keys.file} keeps norms in fp32; here they are as the other weights.")
    half = "bf16" if keys["bf16"] or keys["pure_bf16"] else "fp16" if keys["fp16"] else "fp32"
    if plan.get("lora_rank") or keys["pure_bf16"]:
        said.dims = dims_of(keys, plan, half)
    say_who_shards(keys, plan)
    said.plan = plan
    return said
