"""Accelerate's YAML or JSON, as ``accelerate config`` writes it and ``accelerate launch --config_file`` reads it.

Source: accelerate 1.15.0, `accelerate.commands.config.config_args.ClusterConfig`, the defaults of
`accelerate.commands.launch`, and `accelerate.utils.launch.prepare_multi_gpu_env`, by which they reach the plugin.
"""

from __future__ import annotations

from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.plugin import (
    STRATEGIES,
    Plugin,
    compiled,
    plan_of_accumulation,
    plan_of_deepspeed,
    plan_of_mesh,
    plan_of_plugin,
)
from fsdp_sim.configurations.said import Asked, Said, cluster_of

SECTION = "fsdp_config"


def read(keys: Keys, asked: Asked) -> Said:
    processes = keys["num_processes"]
    if processes is not None and processes < 1 and processes != -1:
        raise keys.wrong("num_processes", processes, "a whole number >= 1")
    way = keys["distributed_type"]
    if way is None:
        raise ValueError(f"{keys.where}: it has no distributed_type, without which Accelerate does not start")
    said = Said(cluster=cluster_of(asked, 1 if way == "NO" else processes, keys["num_machines"]))
    mixed = keys["mixed_precision"] if "mixed_precision" in keys or not keys["fp16"] else "fp16"
    if way == "DEEPSPEED":
        said.plan = plan_of_deepspeed(keys, "deepspeed_config", "deepspeed_config_file", mixed, asked, said.cluster)
    elif way == "FSDP":
        said.plan = plan_of_plugin(_plugin(keys, mixed), keys, asked, said.cluster)
        said.plan |= plan_of_mesh(keys, "parallelism_config", asked, said)
    else:
        said.plan = {"api": "ddp", "param_dtype": None if mixed == "no" else mixed}
    if way != "DEEPSPEED":
        said.plan |= plan_of_accumulation(keys, asked, said.plan["api"], 1)
    said.plan["compile"] = _compiled(keys)
    return said


def _plugin(keys: Keys, mixed: str) -> Plugin:
    version: int = keys[f"{SECTION}.version"]
    policy: str = keys[f"{SECTION}.auto_wrap_policy"]
    plugin = Plugin(
        SECTION, version, mixed, policy, keys[f"{SECTION}.min_num_params"] if policy == "SIZE_BASED_WRAP" else 0,
        keys[f"{SECTION}.offload_params"], activation_checkpointing=keys[f"{SECTION}.activation_checkpointing"],
        activation_checkpointing_offload=keys[f"{SECTION}.activation_checkpointing_offload"],
    )  # fmt: skip
    if version == 2:
        return plugin._replace(reshard_after_forward=_reshard(keys))
    strategy = keys[f"{SECTION}.sharding_strategy"]
    strategy = STRATEGIES[strategy - 1] if isinstance(strategy, int) else strategy
    if "fsdp_config.reshard_after_forward" in keys:
        asked_for = keys[f"{SECTION}.reshard_after_forward"]
        if asked_for not in (True, strategy):
            keys.remarks.append(
                f"With FSDP1 fsdp_reshard_after_forward ({asked_for!r} in {keys.file}) changes nothing: the launcher "
                f"sets sharding_strategy, and it wins ({strategy}). Write fsdp_sharding_strategy."
            )
    return plugin._replace(
        sharding_strategy=strategy, forward_prefetch=keys[f"{SECTION}.forward_prefetch"],
        backward_prefetch=keys[f"{SECTION}.backward_prefetch"],
    )  # fmt: skip


def _reshard(keys: Keys) -> bool:
    value = keys[f"{SECTION}.reshard_after_forward"]
    if not isinstance(value, bool):
        raise keys.wrong(f"{SECTION}.reshard_after_forward", value, "True or False", "with fsdp_version 2")
    return value


def _compiled(keys: Keys) -> bool:
    backend = keys["dynamo_backend"] if "dynamo_backend" in keys else keys["dynamo_config.backend"]
    return compiled(keys, backend == "INDUCTOR", keys["dynamo_config.use_regional_compilation"])
