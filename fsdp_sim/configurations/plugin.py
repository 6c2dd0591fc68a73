"""The plan of Accelerate's `FullyShardedDataParallelPlugin` (1.15.0), which YAML, transformers and axolotl fill.

Sources: `accelerate.utils.dataclasses.FullyShardedDataParallelPlugin.__post_init__`, `set_mixed_precision` there,
`accelerate.utils.fsdp_utils.fsdp2_prepare_model` and `fsdp2_apply_ac`, `Accelerator.prepare_model`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fsdp_sim.configurations.deepspeed import Zero, deepspeed_of, plan_of_zero
from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.said import Asked, Said, need_gpus

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # FSDP_SHARDING_STRATEGY
OURS = {"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"}


class Plugin(NamedTuple):
    """The plugin's fields, under its own names, and the section of the file that filled them."""

    section: str
    fsdp_version: int
    mixed_precision: str
    auto_wrap_policy: str
    min_num_params: int
    cpu_offload: bool
    reshard_after_forward: bool = True
    sharding_strategy: str = "FULL_SHARD"
    forward_prefetch: bool = False
    backward_prefetch: str = "NO_PREFETCH"
    limit_all_gathers: bool = True
    activation_checkpointing: bool = False
    activation_checkpointing_offload: bool = False
    classes: str = "transformer_layer_cls_to_wrap"  # the key that names what is wrapped


def plan_of_plugin(plugin: Plugin, keys: Keys, asked: Asked, cluster: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Plan`; what differs is among the remarks of `keys`.

    Raises:
        ValueError: Accelerate would refuse it, or its shard group depends on what nobody says.
    """
    dtype = None if plugin.mixed_precision in ("no", "fp32") else plugin.mixed_precision
    plan: dict[str, Any] = {
        "api": f"fsdp{plugin.fsdp_version}",
        "param_dtype": dtype,
        "reduce_dtype": dtype,
        "cpu_offload": plugin.cpu_offload,
        "activation_checkpointing": "full" if plugin.activation_checkpointing else None,
        "wrap": _wrap(plugin, keys),
    }
    if plugin.activation_checkpointing_offload:
        if plugin.fsdp_version != 2 or not plugin.activation_checkpointing:
            raise ValueError(
                f"{keys.where}: {plugin.section}.activation_checkpointing_offload is True; Accelerate takes it with "
                f"activation_checkpointing and FSDP2 alone"
            )
        plan["activation_offload"] = "save_on_cpu"
    if plugin.fsdp_version == 2:
        # `fsdp2_prepare_model` gives True to the blocks and the embedding, False to the tail, the default to the root.
        return plan | {"reshard_after_forward": None if plugin.reshard_after_forward else False}
    plan |= {
        "sharding_strategy": OURS.get(plugin.sharding_strategy, plugin.sharding_strategy),
        "forward_prefetch": plugin.forward_prefetch,
        "backward_prefetch": "none" if plugin.backward_prefetch == "NO_PREFETCH" else plugin.backward_prefetch,
        "limit_all_gathers": plugin.limit_all_gathers,
    }
    if "HYBRID" in plugin.sharding_strategy and "shard_size" not in asked.given:
        plan["shard_size"] = _of_a_node(keys, asked, cluster)
    return plan


def plan_of_deepspeed(
    keys: Keys, section: str, file: str, mixed: str, asked: Asked, cluster: dict[str, Any]
) -> dict[str, Any]:
    """The fields of `Plan` of Accelerate's `DeepSpeedPlugin`: of the JSON that ``file`` of a section names or holds,
    else of the section's own keys.

    Raises:
        ValueError: see `deepspeed_of` and `plan_of_zero`.
    """
    if f"{section}.{file}" in keys:
        auto = {"bf16.enabled": mixed == "bf16", "fp16.enabled": mixed == "fp16"}
        return deepspeed_of(keys[f"{section}.{file}"], asked, cluster, keys, auto)
    clipping, accumulated = keys[f"{section}.gradient_clipping"], keys[f"{section}.gradient_accumulation_steps"]
    zero = Zero(
        section, keys[f"{section}.zero_stage"], None if mixed == "no" else mixed,
        offload_optimizer=keys[f"{section}.offload_optimizer_device"],
        offload_param=keys[f"{section}.offload_param_device"],
        clips=clipping != 0,  # auto is 1.0 (`Accelerator._prepare_deepspeed`)
    )  # fmt: skip
    plan = plan_of_zero(zero, keys)
    return plan if accumulated in (None, "auto") else plan | {"grad_accum": accumulated}


def plan_of_mesh(keys: Keys, section: str, asked: Asked, said: Said) -> dict[str, int]:
    """HSDP, of FSDP2: `ParallelismConfig`.

    Raises:
        ValueError: it is not FSDP2, or not as many GPUs as there are.
    """
    if not any(keys.below(section)):
        return {}
    if said.plan["api"] != "fsdp2":
        raise ValueError(f"{keys.where}: {section} goes with fsdp_version 2 alone; leave it out")
    replicas, shards = (keys[f"{section}.dp_{what}_size"] for what in ("replicate", "shard"))
    gpus = need_gpus(keys, asked, said.cluster, f"whether {section} fits")
    if replicas * shards != gpus and "shard_size" not in asked.given:
        raise ValueError(
            f"{keys.where}: {section} has {replicas} replicas of {shards} shards, and there are {gpus} GPUs; "
            f"their product must be {gpus}"
        )
    return {"shard_size": shards} if replicas > 1 else {}


def compiled(keys: Keys, inductor: bool, by_region: bool) -> bool:
    """Whether blocks are compiled."""
    if inductor and not by_region:
        keys.remarks.append(f"{keys.file} compiles the whole model; here each block is compiled.")
    return inductor


def plan_of_accumulation(keys: Keys, asked: Asked, api: str, steps: int, each: bool = False) -> dict[str, Any]:
    """When gradients are reduced: `Accelerator.accumulate` and transformers' loop have all micro-batches but the last
    under ``no_sync``.

    Args:
        steps: micro-batches of a step, where nobody says another number.
        each: the plugin's ``sync_each_batch``.
    """
    if each or asked.given.get("grad_accum", steps) < 2:
        return {}
    if api != "ddp" and "requires_gradient_sync" not in asked.given:
        keys.remarks.append(
            "Accelerate reduces gradients with the last micro-batch alone (no_sync), and until then each GPU holds "
            "them whole; its sync_each_batch=True would reduce them with each."
        )
    return {"requires_gradient_sync": "last"}


def _wrap(plugin: Plugin, keys: Keys) -> str | int:
    blocks = "embed_block_head" if plugin.fsdp_version == 2 else "block"
    if plugin.auto_wrap_policy == "TRANSFORMER_BASED_WRAP":
        named = keys[f"{plugin.section}.{plugin.classes}"]
        if named:
            keys.remarks.append(f"{', '.join(named)} of {keys.file} is taken to be the model's block.")
        return blocks
    beside = ", and the embedding and the head are units of their own there" if plugin.fsdp_version == 2 else ""
    if plugin.auto_wrap_policy == "SIZE_BASED_WRAP" and plugin.min_num_params > 0:
        keys.remarks.append(
            f"{plugin.section}.auto_wrap_policy of {keys.file} cuts inside of blocks too where a module is large "
            f"enough{beside}; here blocks are units, or are not."
        )
        return plugin.min_num_params
    if beside:
        keys.remarks.append(f"{keys.file} wraps no block: the root holds all{beside}, which here the root holds too.")
    return "root"


def _of_a_node(keys: Keys, asked: Asked, cluster: dict[str, Any]) -> int:
    """Ranks of a node: without groups of its own FSDP1 replicates between nodes (`_init_inter_node_process_group`)."""
    if not cluster:
        raise ValueError(
            f"{keys.where}: hybrid sharding shards within a node, of which the file does not say how many GPUs it has; "
            f"give shard_size"
        )
    return int(cluster.get("gpus_per_node") or cluster["gpus"])
