"""axolotl's YAML, which fills transformers' `TrainingArguments`: what those do with it, `trainer` says.

Source: axolotl 0.19.0: `core.builders.base` (`_set_base_training_args`, `_configure_gradient_checkpointing`,
`_configure_optimizer`), `utils.config.normalize_config`, `utils.trainer.setup_parallelism_envs`, `loaders.model`
(`_set_quantization_config`, ``torch_dtype``, `_apply_activation_checkpointing`), `core.fp8`.
"""

from __future__ import annotations

from typing import Any

from fsdp_sim.configurations.adapters import lora_plan
from fsdp_sim.configurations.keys import Keys, schema_of
from fsdp_sim.configurations.loaded import chunked_loss, dims_of, of_preferences
from fsdp_sim.configurations.said import Asked, Said
from fsdp_sim.configurations.trainer import plan_of_arguments

INSTEAD = {"muon": "muon", "optimi_adamw": "adamw"}  # axolotl's own optimizers; others are transformers'
PASSED_OVER = ("sharding_strategy", "limit_all_gathers", "backward_prefetch", "forward_prefetch")
SAVED = {"attention": "scaled_dot_product_attention"}


def read(keys: Keys, asked: Asked) -> Said:
    inner = Keys(schema_of("trainer"), _arguments(keys), keys.where)
    said = Said(model=keys["base_model"], cluster=_gpus(keys, asked))
    seq_len = asked.given.get("seq_len", keys["sequence_len"])
    plan = plan_of_arguments(inner, asked, said.cluster) | {"seq_len": keys["sequence_len"]}
    keys.remarks += inner.remarks
    keys.halved = inner.halved
    if keys["optimizer"] in INSTEAD:
        plan["optimizer"] = INSTEAD[keys["optimizer"]]
    plan |= _mesh(keys, asked, said, plan) | _adapters(keys) | _fp8(keys) | _kernels(keys, seq_len)
    plan |= _checkpoints(keys, plan)
    if keys["rl"]:
        of_preferences(keys, plan, pairs=keys["rl"] != "kto")
    said.plan, said.dims = plan, dims_of(keys, plan, _dtype(keys) or "fp32")
    return said


def _dtype(keys: Keys) -> str | None:
    """bf16, fp16 or None, in which a model is loaded and computes."""
    half = keys["fp16"] or keys["float16"]
    if keys["bfloat16"] or (keys["bf16"] not in ("auto", False)) or (keys["bf16"] == "auto" and not half):
        return "bf16"
    return "fp16" if half else None


def _arguments(keys: Keys) -> dict[str, Any]:
    """What axolotl passes to `TrainingArguments`."""
    micro, steps = keys["micro_batch_size"], keys["gradient_accumulation_steps"]
    if steps is None and (total := keys["batch_size"]):
        if total % micro:
            raise keys.wrong("batch_size", total, f"a multiple of micro_batch_size, {micro}")
        steps = total // micro
    optimizer, dtype = keys["optimizer"], _dtype(keys)
    found: dict[str, Any] = {
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": steps or 1,
        "bf16": dtype == "bf16", "fp16": dtype == "fp16", "tf32": keys["tf32"] is True,
        "optim": "adamw_torch_fused" if optimizer in INSTEAD else optimizer, "max_grad_norm": keys["max_grad_norm"],
        "torch_compile": bool(keys["torch_compile"]), "gradient_checkpointing": bool(keys["gradient_checkpointing"]),
        "gradient_checkpointing_kwargs": _again(keys), "deepspeed": keys["deepspeed"],
        "ddp_bucket_cap_mb": keys["ddp_bucket_cap_mb"], "accelerator_config": keys["accelerator_config"],
    }  # fmt: skip
    if keys["torch_compile"] == "auto":
        keys.remarks.append(f"torch_compile of {keys.file} is auto: taken to be True, as with torch 2.5 and later.")
    if not keys["fsdp"] and not any(keys.below("fsdp_config")):
        return found
    if keys["deepspeed"]:
        raise ValueError(f"{keys.where}: deepspeed and fsdp are both given; axolotl takes one")
    return found | {"fsdp": True, "fsdp_config": _fsdp(keys)}


def _again(keys: Keys) -> dict[str, Any]:
    given = keys["gradient_checkpointing_kwargs"]
    if given is None and not keys["rl"]:
        return {"use_reentrant": True}
    return dict(given or {"use_reentrant": False})


def _fsdp(keys: Keys) -> dict[str, Any]:
    section = "fsdp_config"
    version = keys["fsdp_version"] or keys[f"{section}.version"]
    if version is None:
        keys.remarks.append(f"{keys.file} says nothing of fsdp_version, which axolotl takes to be 1.")
    for name in PASSED_OVER:
        if (dotted := f"{section}.{name}") in keys:
            keys.remarks.append(f"{dotted} of {keys.file} ({keys[dotted]!r}) changes nothing: axolotl passes over it.")
    return {
        "version": version or 1, "cpu_offload": keys[f"{section}.offload_params"],
        **{
            name: keys[f"{section}.{name}"]
            for name in (
                "activation_checkpointing", "auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params",
                "reshard_after_forward",
            )
        },
    }  # fmt: skip


def _gpus(keys: Keys, asked: Asked) -> dict[str, Any]:
    """The GPUs that a mesh or Ray's workers say."""
    shards, replicas = keys["dp_shard_size"], keys["dp_replicate_size"]
    gpus = shards * replicas if shards > 1 else keys["ray_num_workers"] if keys["use_ray"] else None
    return {"gpus": gpus} if gpus and asked.gpus is None else {}


def _mesh(keys: Keys, asked: Asked, said: Said, plan: dict[str, Any]) -> dict[str, Any]:
    shards, replicas = keys["dp_shard_size"], keys["dp_replicate_size"]
    if replicas == 1 or "shard_size" in asked.given:
        return {}
    if plan["api"] != "fsdp2" or shards == 1:
        raise keys.wrong("dp_replicate_size", replicas, "1", "replicas of shards take fsdp_version 2 and dp_shard_size")
    if (gpus := asked.gpus or said.cluster.get("gpus")) != shards * replicas:
        raise ValueError(
            f"{keys.where}: dp_replicate_size {replicas} times dp_shard_size {shards} is not {gpus} GPUs; make it so"
        )
    return {"shard_size": shards}


def _adapters(keys: Keys) -> dict[str, Any]:
    kind = keys["adapter"]
    if kind is None:
        if keys["load_in_4bit"]:
            raise keys.wrong("load_in_4bit", True, "False", "weights of four bits are trained by adapter: qlora alone")
        return {}
    rank = keys["lora_r"]
    if rank is None:
        raise ValueError(f"{keys.where}: adapter is {kind}, and lora_r is not given; give it")
    targets = keys["lora_target_modules"]
    named = (targets,) if isinstance(targets, str) else targets
    if keys["lora_target_linear"]:
        named = ("all-linear",)
    plan = lora_plan(keys, rank, named, "lora_target_modules")
    if kind == "qlora" and keys["load_in_4bit"]:
        own = keys["bnb_config_kwargs"] or {}
        double = "_double_quant" * bool(own.get("bnb_4bit_use_double_quant", True))
        plan["base_quantization"] = f"{own.get('bnb_4bit_quant_type', 'nf4')}{double}"
    elif kind == "qlora":
        raise keys.wrong("load_in_4bit", False, "True", "adapter is qlora")
    return plan


def _checkpoints(keys: Keys, plan: dict[str, Any]) -> dict[str, Any]:
    """What is not a plain checkpoint of each block."""
    offload = keys["activation_offloading"] or keys["gradient_checkpointing"] in ("offload", "offload_disk")
    if keys["gradient_checkpointing"] == "offload_disk":
        raise keys.wrong("gradient_checkpointing", "offload_disk", "True, False or 'offload'", "no disk is simulated")
    if offload and plan["api"] != "fsdp2":
        raise ValueError(
            f"{keys.where}: it offloads activations with {plan['api']}, which is simulated with FSDP2 alone; leave "
            f"activation_offloading out, or set fsdp_version: 2"
        )
    if offload:  # with adapters it replaces the computing again
        again = None if plan.get("lora_rank") else "full"
        return {"activation_offload": "streams", "activation_checkpointing": again}
    selective = keys["selective_checkpointing"]
    if not selective:
        return {}
    saved = selective.get("save", ["attention"]) if isinstance(selective, dict) else ["attention"]
    if saved != ["attention"] or (isinstance(selective, dict) and set(selective) - {"save"}):
        raise keys.wrong("selective_checkpointing", selective, "True, or save: [attention]", "no other is read")
    return {"activation_checkpointing": ("scaled_dot_product_attention",)}


def _fp8(keys: Keys) -> dict[str, Any]:
    if not keys["fp8"]:
        return {}
    recipe = (keys["fp8_config"] or {}).get("recipe", "tensorwise")
    return {"fp8": recipe, "fp8_all_gather": keys["fp8_enable_fsdp_float8_all_gather"]}


def _kernels(keys: Keys, seq_len: int) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    if keys["attn_implementation"] == "eager" or keys["eager_attention"]:
        plan["attention_impl"] = "math"
    if keys["liger_rms_norm"]:
        plan["rms_norm"] = "fused"
    for name in ("liger_fused_linear_cross_entropy", "cut_cross_entropy"):
        if keys[name]:
            plan |= chunked_loss(keys, name, seq_len)
    if keys["chunked_cross_entropy"]:
        keys.remarks.append(f"chunked_cross_entropy of {keys.file} computes the loss in chunks; here it is one kernel.")
    return plan
