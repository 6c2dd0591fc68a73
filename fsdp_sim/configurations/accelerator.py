"""Accelerate in a script: `Accelerator` and the plugins that it is given, read from a Python file.

Source: accelerate 1.15.0, `Accelerator.__init__` and `prepare_model`, `FullyShardedDataParallelPlugin.__post_init__`,
`DeepSpeedPlugin`, `GradientAccumulationPlugin`, `TorchDynamoPlugin`. What ``accelerate launch`` sets besides, its file
says (`fsdp_sim.configurations.accelerate`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_sim.configurations.adapters import plan_of_calls
from fsdp_sim.configurations.keys import Keys, Unread
from fsdp_sim.configurations.plugin import (
    STRATEGIES,
    Plugin,
    compiled,
    plan_of_accumulation,
    plan_of_deepspeed,
    plan_of_mesh,
    plan_of_plugin,
)
from fsdp_sim.configurations.said import Asked, Said
from fsdp_sim.configurations.torch_values import (
    BACKWARD_PREFETCHES,
    dtypes_of,
    enum_of,
    offloads,
    wrap_of,
)
from fsdp_sim.configurations.trainer import said_with_model, say_who_shards

FSDP, ZERO, STEPS = "FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "GradientAccumulationPlugin"
DYNAMO, MESH = "TorchDynamoPlugin", "ParallelismConfig"
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
WRAPS = {"root": "NO_WRAP", "block": "TRANSFORMER_BASED_WRAP"}


def read(keys: Keys, asked: Asked) -> Said:
    mixed, steps, each = keys["Accelerator.mixed_precision"], keys["Accelerator.gradient_accumulation_steps"], False
    if _has(keys, "gradient_accumulation_plugin", STEPS):
        steps, each = keys[f"{STEPS}.num_steps"], keys[f"{STEPS}.sync_each_batch"]
    said = Said()
    if _has(keys, "deepspeed_plugin", ZERO):
        said.plan = {"grad_accum": steps} | plan_of_deepspeed(keys, ZERO, "hf_ds_config", mixed, asked, {})
    else:
        said.plan = {"api": "ddp", "param_dtype": None if mixed == "no" else mixed}
        if _has(keys, "fsdp_plugin", FSDP):
            said.plan = _sharded(keys, asked, mixed)
        say_who_shards(keys, said.plan)
        said.plan |= {"grad_accum": steps} | plan_of_accumulation(keys, asked, said.plan["api"], steps, each)
    if _has(keys, "parallelism_config", MESH):
        said.plan |= plan_of_mesh(keys, MESH, asked, said)
    said.plan |= {"compile": _compiled(keys)} | plan_of_calls(keys)
    return said_with_model(keys, said.plan)


def _has(keys: Keys, argument: str, name: str) -> bool:
    """Whether `Accelerator` is given a plugin, whose call is in the file.

    Raises:
        ValueError: it is made elsewhere; or made, and given to nobody.
    """
    dotted, made = f"Accelerator.{argument}", name in keys.sections
    given = keys[dotted]
    if given is None and made:
        raise ValueError(f"{keys.where} calls {name}, and does not give it to Accelerator; write {argument}=...")
    if given is not None and not made:
        raise keys.wrong(dotted, given, f"a {name} that this file calls")
    if isinstance(given, Unread):
        keys.remarks.append(f"{given.source} in line {given.line} of {keys.file} is taken to be its {name}.")
    return made


def _sharded(keys: Keys, asked: Asked, mixed: str) -> dict[str, Any]:
    version = keys[f"{FSDP}.fsdp_version"]
    plugin = Plugin(
        FSDP, version, mixed, *_policy(keys), offloads(keys[f"{FSDP}.cpu_offload"]),
        activation_checkpointing=keys[f"{FSDP}.activation_checkpointing"],
        activation_checkpointing_offload=keys[f"{FSDP}.activation_checkpointing_offload"],
        classes="transformer_cls_names_to_wrap",
    )  # fmt: skip
    plugin = _fsdp2(keys, plugin) if version == 2 else _fsdp1(keys, plugin)
    plan = plan_of_plugin(plugin, keys, asked, {})
    policy = keys[f"{FSDP}.mixed_precision_policy"]
    if isinstance(policy, Mapping):
        return plan | dtypes_of(keys, f"{FSDP}.mixed_precision_policy")
    if policy in ("fp16", "bf16", "fp32"):
        return plan | {"param_dtype": policy, "reduce_dtype": policy}
    if policy is not None:
        raise keys.wrong(f"{FSDP}.mixed_precision_policy", policy, "'fp16', 'bf16', 'fp32' or torch's MixedPrecision")
    return plan


def _policy(keys: Keys) -> tuple[str, int]:
    """The wrap policy as Accelerate calls it, and how many parameters its units have at least."""
    dotted = f"{FSDP}.auto_wrap_policy"
    if isinstance(keys[dotted], str):
        policy = enum_of(keys, dotted, POLICIES)
        return policy, keys[f"{FSDP}.min_num_params"] if policy == "SIZE_BASED_WRAP" else 0
    units = wrap_of(keys, dotted)
    return ("SIZE_BASED_WRAP", units) if isinstance(units, int) else (WRAPS[units], 0)


def _fsdp2(keys: Keys, plugin: Plugin) -> Plugin:
    reshard = keys[f"{FSDP}.reshard_after_forward"]
    if reshard is None and f"{FSDP}.sharding_strategy" in keys:
        raise keys.wrong(f"{FSDP}.sharding_strategy", keys[f"{FSDP}.sharding_strategy"], "left out",
                         "with fsdp_version 2 Accelerate asks for reshard_after_forward")  # fmt: skip
    if reshard is not None and not isinstance(reshard, bool):
        raise keys.wrong(f"{FSDP}.reshard_after_forward", reshard, "True or False", "with fsdp_version 2")
    if f"{FSDP}.forward_prefetch" in keys:
        raise keys.wrong(f"{FSDP}.forward_prefetch", keys[f"{FSDP}.forward_prefetch"], "left out",
                         "Accelerate refuses it with fsdp_version 2")  # fmt: skip
    return plugin._replace(reshard_after_forward=reshard is not False)


def _fsdp1(keys: Keys, plugin: Plugin) -> Plugin:
    strategy = keys[f"{FSDP}.sharding_strategy"] or "FULL_SHARD"
    if isinstance(strategy, int):
        strategy = STRATEGIES[strategy - 1]
    elif f"{FSDP}.sharding_strategy" in keys:
        strategy = enum_of(keys, f"{FSDP}.sharding_strategy", (*STRATEGIES, "_HYBRID_SHARD_ZERO2")).removeprefix("_")
    reshard = keys[f"{FSDP}.reshard_after_forward"]
    if isinstance(reshard, bool):
        raise keys.wrong(f"{FSDP}.reshard_after_forward", reshard, "left out", "with fsdp_version 1; write "
                         "sharding_strategy, or fsdp_version=2")  # fmt: skip
    if reshard is not None and reshard.rpartition(".")[2].upper() != strategy:
        keys.remarks.append(
            f"With FSDP1 reshard_after_forward ({reshard} in {keys.file}) changes nothing: sharding_strategy wins "
            f"({strategy})."
        )
    prefetch = f"{FSDP}.backward_prefetch"
    return plugin._replace(
        sharding_strategy=strategy, forward_prefetch=keys[f"{FSDP}.forward_prefetch"],
        limit_all_gathers=keys[f"{FSDP}.limit_all_gathers"],
        backward_prefetch=enum_of(keys, prefetch, (*BACKWARD_PREFETCHES, "NO_PREFETCH")),
    )  # fmt: skip


def _compiled(keys: Keys) -> bool:
    """What `dynamo_backend` or a `TorchDynamoPlugin` compiles; a text, or a member of `DynamoBackend`."""
    at, by_region = "Accelerator.dynamo_backend", False
    if _has(keys, "dynamo_plugin", DYNAMO):
        at, by_region = f"{DYNAMO}.backend", keys[f"{DYNAMO}.use_regional_compilation"]
        if keys[f"{DYNAMO}.disable"]:
            return False
    if at not in keys:
        return False
    return compiled(keys, enum_of(keys, at, ("NO", "INDUCTOR")) == "INDUCTOR", by_region)
