"""torchtune's YAML of a recipe that fine-tunes: all by FSDP2, with parameters in ``dtype`` and nothing cast.

Source: torchtune 0.6.1, `full_finetune_distributed` and `lora_finetune_distributed` (``_setup_model``),
`training.shard_model` and `get_shard_conditions`, `training.compile_model`,
`training.activations.apply_selective_activation_checkpointing`.
"""

from __future__ import annotations

import re
from typing import Any

from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.loaded import of_preferences
from fsdp_sim.configurations.said import Asked, Said
from fsdp_sim.spec import Model

OPTIMIZERS = {  # by the end of _component_; torch's own default is foreach, bitsandbytes and torchao have one kernel
    "optim.Adam": "adamw", "optim.AdamW": "adamw", "optim.SGD": "sgd", "PagedAdamW": "adamw", "PagedAdam": "adamw",
    "AdamW8bit": "adamw_8bit", "Adam8bit": "adamw_8bit", "PagedAdamW8bit": "adamw_8bit",
}  # fmt: skip
MLP = ("gate_proj", "up_proj", "down_proj")
OTHERWISE = {"phi4_14b": "phi-4"}  # what the catalogue calls it


def read(keys: Keys, asked: Asked) -> Said:
    if missing := [key for key in ("optimizer._component_", "batch_size") if key not in keys]:
        raise ValueError(f"{keys.where}: it has no {' and no '.join(missing)}, so that it does not train")
    plan: dict[str, Any] = {
        "api": "ddp" if asked.gpus == 1 else "fsdp2", "param_dtype": None, "reduce_dtype": None,
        "micro_batch": keys["batch_size"], "grad_accum": keys["gradient_accumulation_steps"],
        "compile": keys["compile"], "cross_entropy": "compiled" if keys["compile"] else "torch",
        "clip_grad_norm": keys["clip_grad_norm"] is not None, **_optimizer(keys), **_activations(keys),
    }  # fmt: skip
    if plan["api"] == "fsdp2" or plan.get("activation_offload"):
        plan |= _sharding(keys) | {"api": "fsdp2"}
    if (tokens := keys["tokenizer.max_seq_len"]) is not None:
        plan["seq_len"] = tokens
        if not keys["dataset.packed"]:
            keys.remarks.append(f"{keys.file} pads a batch to its longest sequence; taken to be {tokens} tokens each.")
    if (loss := keys["loss._component_"]) and "DPO" in loss:
        of_preferences(keys, plan)
    if keys["dtype"] is None:
        raise ValueError(f"{keys.where}: it has no dtype, without which no recipe of torchtune starts")
    said = Said(plan | _adapters(keys), dims={"dtype": keys["dtype"]})
    said.model = _model(keys)
    return said


def _component(keys: Keys, section: str) -> str:
    return str(keys[f"{section}._component_"] or "").rpartition(".")[2]


def _sharding(keys: Keys) -> dict[str, Any]:
    """`shard_model`: each layer, what ``custom_sharded_layers`` names, and the root, all with the same argument."""
    named = set(keys["custom_sharded_layers"] or ())
    if named - {"tok_embeddings", "output"}:
        raise keys.wrong("custom_sharded_layers", sorted(named), "tok_embeddings, output or both", "no other is a unit")
    if named:
        keys.remarks.append(
            f"{' and '.join(sorted(named))} of {keys.file} are units of their own; here the embedding is one, and the "
            f"last norm with the head another."
        )
    offload = keys["fsdp_cpu_offload"] or ("fsdp.cpu_offload" in keys and keys["fsdp.cpu_offload"])
    return {
        "wrap": "embed_block_head" if named else "block", "cpu_offload": offload,
        "reshard_after_forward": keys["fsdp_reshard_after_forward"],
    }  # fmt: skip


def _activations(keys: Keys) -> dict[str, Any]:
    mode, again = keys["ac_mode"], keys["enable_activation_checkpointing"]
    offload = keys["enable_activation_offloading"]
    if offload and not again:
        raise keys.wrong("enable_activation_offloading", True, "False", "it takes enable_activation_checkpointing")
    kept: str | int | None = "full" if again and mode is None else None
    if not again and mode == "full":
        kept = "full"
    elif not again and mode == "selective":
        kept = "selective" if keys["ac_option"] == "op" else keys["ac_option"]
        if kept is None:
            raise ValueError(f"{keys.where}: ac_mode is selective, and ac_option is not given; give 'op' or a number")
    return {"activation_checkpointing": kept, "activation_offload": "streams" if offload else None}


def _optimizer(keys: Keys) -> dict[str, Any]:
    named = keys["optimizer._component_"]
    found = next((ours for end, ours in OPTIMIZERS.items() if f".{named}".endswith(f".{end}")), None)
    if found is None:
        raise keys.wrong("optimizer._component_", named, ", ".join(sorted(OPTIMIZERS)), "no other is simulated")
    if "Paged" in named:
        keys.remarks.append(f"{named} of {keys.file} may page its states out to the CPU; here they stay on the GPU.")
    if found == "sgd" and keys["optimizer.momentum"]:
        found = "sgd_momentum"
    foreach = named.startswith("torch.optim") and not keys["optimizer.fused"]
    return {"optimizer": found, "optimizer_impl": "foreach" if foreach else "fused"}


def _adapters(keys: Keys) -> dict[str, Any]:
    name, rank = _component(keys, "model"), keys["model.lora_rank"]
    quantized = name.startswith("qlora_") or keys["model.quantize_base"]
    if not name.startswith(("lora_", "qlora_")):
        return {}
    if rank is None:
        rank = 8
        keys.defaults["model.lora_rank"] = rank
    targets = tuple(one.replace("output_proj", "o_proj") for one in keys["model.lora_attn_modules"] or ())
    if keys["model.apply_lora_to_mlp"]:
        targets += MLP
    if not targets:
        raise ValueError(f"{keys.where}: {name} has neither lora_attn_modules nor apply_lora_to_mlp; give one")
    plan = {"lora_rank": rank, "lora_targets": targets}
    return plan | {"base_quantization": "nf4_double_quant"} if quantized else plan  # torchao's NF4Tensor


def _model(keys: Keys) -> str | None:
    """The name in the catalogue of ``torchtune.models.llama3_1.lora_llama3_1_8b``, or its own."""
    name = re.sub(r"^q?lora_|_(instruct|base)$", "", _component(keys, "model"))
    if name in OTHERWISE:
        return OTHERWISE[name]
    squeezed = name.replace("_", "")
    return next((one for one in Model.presets() if re.sub(r"[^a-z0-9]", "", one) == squeezed), name or None)
