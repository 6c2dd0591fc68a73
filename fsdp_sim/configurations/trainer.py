"""Hugging Face's `TrainingArguments`: JSON, YAML, or the call in a Python file, and the ``fsdp_config`` file alone.

Source: transformers 5.24.0, `transformers.training_args.TrainingArguments`: `_process_fsdp_args`,
`_apply_legacy_fsdp_to_config` and ``mixed_precision`` in `__post_init__`; `transformers.modeling_utils` for
``use_reentrant`` (False). Accelerate 1.15.0 does the rest (`fsdp_sim.configurations.plugin`).
"""

from __future__ import annotations

from typing import Any

from fsdp_sim.configurations.adapters import plan_of_calls
from fsdp_sim.configurations.deepspeed import deepspeed_of
from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.kinds import Wrong, converted
from fsdp_sim.configurations.loaded import chunked_loss, dims_of
from fsdp_sim.configurations.plugin import STRATEGIES, Plugin, plan_of_accumulation, plan_of_plugin
from fsdp_sim.configurations.said import Asked, Said, dtype_of
from fsdp_sim.configurations.texts import Tree, text_of_file, tree_of

SECTION = "fsdp_config"
OPTIMIZERS = {  # get_optimizer_cls_and_kwargs of transformers.trainer_optimizer: torch's own default is foreach
    "adamw_torch": ("adamw", "foreach"), "adamw_torch_fused": ("adamw", "fused"), "sgd": ("sgd", "foreach"),
    "adamw_hf": ("adamw", "foreach"), "adamw_8bit": ("adamw_8bit", "fused"), "adamw_bnb_8bit": ("adamw_8bit", "fused"),
    "adamw_torch_8bit": ("adamw_8bit", "fused"), "paged_adamw_8bit": ("adamw_8bit", "fused"),
    "paged_adamw_32bit": ("adamw", "fused"),
}  # fmt: skip


def read(keys: Keys, asked: Asked) -> Said:
    plan = plan_of_arguments(keys, asked, {}) | plan_of_calls(keys)
    if keys["use_liger_kernel"]:
        plan |= chunked_loss(keys, "use_liger_kernel", asked.given.get("seq_len", 1024))
    return said_with_model(keys, plan)


def said_with_model(keys: Keys, plan: dict[str, Any]) -> Said:
    """A plan, and the model that the file or its script loads."""
    said = Said(plan=plan, model=keys["model_name_or_path"])
    if _says_dtype(keys):
        said.dims = dims_of(keys, plan, dtype_of(keys["dtype"]))
    elif plan["api"] == "ddp" and plan["param_dtype"] and not plan.get("base_quantization"):
        keys.remarks.append(  # PreTrainedModel.from_pretrained: dtype is "auto"
            f"A script loads the model beside {keys.file}, and DDP keeps its dtype: taken to be fp32, unless "
            f"model_dtype says another; from_pretrained takes the checkpoint's, mostly bf16."
        )
    return said


def _says_dtype(keys: Keys) -> bool:
    """Whether it is said in which dtype the model is loaded."""
    return keys.given.get("dtype", "auto") != "auto"


def plan_of_arguments(
    keys: Keys, asked: Asked, cluster: dict[str, Any], mixed: str | None = None, checkpoints: bool | None = None
) -> dict[str, Any]:
    """The fields of `Plan` of training arguments.

    Args:
        cluster: what is known of it.
        mixed: mixed precision, where the format has a default of its own.
        checkpoints: whether blocks are computed again, where the format has a default of its own.
    """
    if mixed is None:
        mixed = "fp16" if keys["fp16"] else "bf16" if keys["bf16"] else "no"  # __post_init__, in its order
    checkpoints = _checkpoints(keys) if checkpoints is None else checkpoints
    batch, steps = keys["per_device_train_batch_size"], keys["gradient_accumulation_steps"]
    if "deepspeed" in keys:
        plan = _zero(keys, asked, cluster, mixed)
    elif _is_sharded(keys):
        plan = _sharded(keys, asked, cluster, mixed)
    else:
        plan = {"api": "ddp", "param_dtype": None if mixed == "no" else mixed}
        if "ddp_bucket_cap_mb" in keys:
            plan["bucket_cap_mb"] = keys["ddp_bucket_cap_mb"]
    if checkpoints:
        plan["activation_checkpointing"] = "full"
        again = keys["gradient_checkpointing_kwargs"] or keys["activation_checkpointing_kwargs"] or {}
        if plan["api"] == "fsdp1" and again.get("use_reentrant") is True:
            plan["use_reentrant"] = True
    # the batch and the optimizer of a DeepSpeed file win over the arguments'
    plan = {"stack": "hf-trainer", "micro_batch": batch, "grad_accum": steps} | _optimizer(keys, plan["api"]) | plan
    if "deepspeed" not in keys:
        plan |= plan_of_accumulation(keys, asked, plan["api"], steps, _each_batch(keys, asked))
    if keys["torch_compile"]:
        plan["compile"] = True
        keys.remarks.append(f"{keys.file} compiles the whole model; here each block is compiled.")
    if keys["tf32"] and mixed != "no":
        keys.remarks.append(f"tf32 of {keys.file} changes nothing of matmuls in {mixed}.")
    elif keys["tf32"]:
        plan["float32_matmul_precision"] = "high"
    if mixed == "no" and not _says_dtype(keys):
        keys.remarks.append(
            f"{keys.file} computes in the dtype in which the model is loaded: fp32, unless model_dtype says another."
        )
    return plan


def say_who_shards(keys: Keys, plan: dict[str, Any]) -> None:
    """Where the arguments do not shard, the command that starts them may."""
    if plan["api"] == "ddp":
        keys.remarks.append(
            f"{keys.file} itself does not shard, and so it is DDP; if accelerate launch starts it with a file that "
            f"does, give --api and what else that file says beside this one."
        )


def _checkpoints(keys: Keys) -> bool:
    named = "activation_checkpointing" if "activation_checkpointing" in keys else "gradient_checkpointing"
    return bool(keys[named])


def _optimizer(keys: Keys, api: str) -> dict[str, Any]:
    name = keys["optim"]
    if name.startswith("paged"):
        keys.remarks.append(f"{name} of {keys.file} may page its states out to the CPU; here they stay on the GPU.")
    optimizer, impl = OPTIMIZERS[name]
    plan = {"optimizer": optimizer, "optimizer_impl": impl}
    clips = keys["max_grad_norm"] > 0
    if api != "zero2":
        return plan | {"clip_grad_norm": clips}
    if clips:
        keys.remarks.append(f"{keys.file} clips gradients, which is not simulated with ZeRO stage 2.")
    return plan


def _is_sharded(keys: Keys) -> bool:
    return bool(keys["fsdp"]) or ("fsdp" not in keys and any(keys.below(SECTION)))


def _sharded(keys: Keys, asked: Asked, cluster: dict[str, Any], mixed: str) -> dict[str, Any]:
    if "fsdp" not in keys:
        keys.remarks.append(
            f"{keys.file} has fsdp_config without fsdp, without which transformers does not shard; taken as True."
        )
    if "fsdp_config" in keys:
        keys.add(SECTION, _file_of(keys, asked, "fsdp_config"))
    for old in ("transformer_layer_cls_to_wrap", "min_num_params"):  # of 4.57.1, beside fsdp_config
        if f"fsdp_{old}" in keys and f"{SECTION}.{old}" not in keys:
            keys.add(SECTION, {old: keys[f"fsdp_{old}"]})
    version = keys[f"{SECTION}.version"]
    words = keys["fsdp"] if isinstance(keys["fsdp"], tuple) else ()
    offload, reshard = _legacy(keys, words, version)
    policy = keys[f"{SECTION}.auto_wrap_policy"]
    plugin = Plugin(
        SECTION, version, mixed, policy, keys[f"{SECTION}.min_num_params"] if policy == "SIZE_BASED_WRAP" else 0,
        keys[f"{SECTION}.cpu_offload"] or offload, activation_checkpointing=keys[f"{SECTION}.activation_checkpointing"],
    )  # fmt: skip
    if version == 2:
        if not isinstance(reshard, bool):
            raise keys.wrong(f"{SECTION}.reshard_after_forward", reshard, "True or False", "with FSDP2")
        return plan_of_plugin(plugin._replace(reshard_after_forward=reshard), keys, asked, cluster)
    if reshard not in (True, "FULL_SHARD"):
        keys.remarks.append(
            f"With FSDP1 the sharding strategy of {keys.file} ({reshard}) changes nothing: transformers passes it as "
            f"reshard_after_forward, and Accelerate's own sharding_strategy wins (FULL_SHARD)."
        )
    return plan_of_plugin(
        plugin._replace(
            forward_prefetch=keys[f"{SECTION}.forward_prefetch"],
            backward_prefetch=keys[f"{SECTION}.backward_prefetch"],
            limit_all_gathers=keys[f"{SECTION}.limit_all_gathers"],
        ),
        keys, asked, cluster,
    )  # fmt: skip


def _legacy(keys: Keys, words: tuple[str, ...], version: int) -> tuple[bool, bool | str]:
    """What the words of ``fsdp="full_shard offload auto_wrap"`` say: whether to offload, and the sharding."""
    given = keys.given.get(f"{SECTION}.reshard_after_forward")
    offload = False
    for word in words:
        if word.upper() in STRATEGIES:
            if version == 2 and word.upper() not in STRATEGIES[:2]:
                raise keys.wrong("fsdp", word, "'full_shard' or 'shard_grad_op'", "others need fsdp_config.version 1")
            said = word.upper() == "FULL_SHARD" if version == 2 else word.upper()
            given = said if given is None else given
        elif word == "offload":
            offload = True
        elif word != "auto_wrap":
            raise keys.wrong("fsdp", word, "'full_shard', 'shard_grad_op', 'offload' or 'auto_wrap'")
    return offload, keys[f"{SECTION}.reshard_after_forward"] if given is None else given


def _each_batch(keys: Keys, asked: Asked) -> bool:
    """Whether gradients are reduced with each micro-batch: ``sync_each_batch`` of accelerator_config."""
    given = keys["accelerator_config"] or {}
    if isinstance(given, str):
        given = _file_of(keys, asked, "accelerator_config")
    inner = given.get("gradient_accumulation_kwargs") or {}
    try:
        return bool(converted("bool", converted("table", inner).get("sync_each_batch", False)))
    except Wrong:
        name = "accelerator_config.gradient_accumulation_kwargs"
        raise keys.wrong(name, inner, "a table with sync_each_batch True or False") from None


def _file_of(keys: Keys, asked: Asked, name: str) -> Tree:
    """The keys of the JSON that ``name`` names."""
    path = asked.folder / keys[name]
    try:
        tree, passed_over = tree_of(text_of_file(path), str(path), ".json")
    except OSError as error:
        raise ValueError(f"{keys.where}: {name} {path} cannot be read: {error.strerror}") from None
    if passed_over:
        keys.remarks.append(f"{path.name} {passed_over}")
    return tree


def _zero(keys: Keys, asked: Asked, cluster: dict[str, Any], mixed: str) -> dict[str, Any]:
    auto = {
        "gradient_clipping": keys["max_grad_norm"], "bf16.enabled": mixed == "bf16", "fp16.enabled": mixed == "fp16",
        "train_micro_batch_size_per_gpu": keys["per_device_train_batch_size"],
        "gradient_accumulation_steps": keys["gradient_accumulation_steps"],
    }  # fmt: skip
    return deepspeed_of(keys["deepspeed"], asked, cluster, keys, auto)
