"""Lightning's `Trainer` and `Fabric` with their strategy: the YAML of LightningCLI, or the calls in a Python file.

Source: lightning 2.6.6, `FSDPStrategy` (``__init__``, ``_setup_model``) and `FSDPPrecision`, which has parameters in
fp32 for ``mixed`` and in the half for ``true``; `ModelParallelStrategy.setup_environment` for its sizes;
`DeepSpeedStrategy._create_default_config`; `AcceleratorConnector._check_and_init_precision`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_sim.configurations.deepspeed import Zero, deepspeed_of, plan_of_zero
from fsdp_sim.configurations.keys import Keys, Unread
from fsdp_sim.configurations.kinds import Wrong, converted
from fsdp_sim.configurations.said import Asked, Said, cluster_of
from fsdp_sim.configurations.torch_values import (
    BACKWARD_PREFETCHES,
    SHARDING_STRATEGIES,
    arguments_of,
    dtypes_of,
    enum_of,
    offloads,
    wrap_of,
)
from fsdp_sim.words import did_you_mean

PRECISIONS = {16: "16-mixed", "bf16": "bf16-mixed", 32: "32-true"}
HALVES = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
NAMED: dict[str, tuple[str, dict[str, Any]]] = {  # the registries of strategies: the class and what it is given
    "auto": ("DDPStrategy", {}), "ddp": ("DDPStrategy", {}), "ddp_spawn": ("DDPStrategy", {}),
    "ddp_find_unused_parameters_true": ("DDPStrategy", {}), "ddp_find_unused_parameters_false": ("DDPStrategy", {}),
    "fsdp": ("FSDPStrategy", {}), "fsdp_cpu_offload": ("FSDPStrategy", {"cpu_offload": True}),
    "deepspeed": ("DeepSpeedStrategy", {}), "deepspeed_stage_1": ("DeepSpeedStrategy", {"stage": 1}),
    "deepspeed_stage_2": ("DeepSpeedStrategy", {"stage": 2}), "deepspeed_stage_3": ("DeepSpeedStrategy", {"stage": 3}),
    "deepspeed_stage_2_offload": ("DeepSpeedStrategy", {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3_offload": (
        "DeepSpeedStrategy", {"stage": 3, "offload_optimizer": True, "offload_parameters": True}
    ),
}  # fmt: skip
MEGATRONS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "global_batch_size", "megatron_amp_O2")
STRATEGIES = {"FSDPStrategy", "ModelParallelStrategy", "DDPStrategy", "DeepSpeedStrategy"}


def read(keys: Keys, asked: Asked) -> Said:
    model = keys.given.get("model")
    if isinstance(model, Mapping) and (of_nemo := next((key for key in MEGATRONS if key in model), None)):
        raise ValueError(
            f"{keys.where}: model.{of_nemo} is NeMo's, which trains with Megatron: its files are not read; give model, "
            f"GPUs and plan as options"
        )
    name = _strategy(keys)
    precision = keys["trainer.precision"]
    precision = PRECISIONS.get(precision, precision)
    half = HALVES.get(precision)
    said = Said(cluster=_gpus(keys, asked))
    if name == "FSDPStrategy":
        said.plan = _fsdp(keys, asked, half)
    elif name == "ModelParallelStrategy":
        said.plan = _model_parallel(keys, asked, said, precision)
    elif name == "DeepSpeedStrategy":
        said.plan = _zero(keys, asked, said, half)
    else:
        said.plan = {"api": "ddp", "param_dtype": half}
        if "DDPStrategy.bucket_cap_mb" in keys:
            said.plan["bucket_cap_mb"] = keys["DDPStrategy.bucket_cap_mb"]
        if asked.given.get("grad_accum", keys["trainer.accumulate_grad_batches"]) > 1:
            said.plan["requires_gradient_sync"] = "last"  # ParallelStrategy.block_backward_sync, which is DDP's alone
    said.plan |= {"grad_accum": keys["trainer.accumulate_grad_batches"]} | _clipping(keys, name) | _batch(keys)
    if precision.endswith("-true"):
        said.dims["dtype"] = half or "fp32"
    return said


def _strategy(keys: Keys) -> str:
    """The name of the strategy's class, whose arguments are among the keys now."""
    value = keys["trainer.strategy"]
    given = [name for name in STRATEGIES if any(keys.below(name))]
    if isinstance(value, str):
        if "trainer.strategy" not in keys and given:
            return given[0]
        short = value.rpartition(".")[2]
        if short in STRATEGIES:
            return short
        if value not in NAMED:
            raise ValueError(f"{keys.where}: there is no strategy {value!r} that is read; {did_you_mean(value, NAMED)}")
        name, arguments = NAMED[value]
        keys.add(name, arguments)
        return name
    path = str(value.get("class_path") or value.get("call"))
    name = path.rpartition(".")[2]
    if name not in STRATEGIES:
        raise ValueError(f"{keys.where}: there is no strategy {path} that is read; {did_you_mean(name, STRATEGIES)}")
    if "call" not in value:
        inner = value.get("init_args") or {}
        if not isinstance(inner, Mapping) or set(value) - {"class_path", "init_args"}:
            raise keys.wrong("trainer.strategy", value, "a table of class_path and init_args")
        keys.add(name, inner)
    elif name not in given:
        keys.add(name, {key: one for key, one in value.items() if key != "call" and not key.startswith("arg")})
    return name


def _gpus(keys: Keys, asked: Asked) -> dict[str, Any]:
    """The GPUs that ``devices`` and ``num_nodes`` say."""
    devices, nodes = keys["trainer.devices"], keys["trainer.num_nodes"]
    if isinstance(devices, Unread) or isinstance(nodes, Unread) or str(devices) in ("auto", "-1"):
        if asked.gpus is None:
            keys.remarks.append(f"devices of {keys.file} are what the run finds; --gpus says how many there are.")
        return {}
    try:
        per_node = len(devices) if isinstance(devices, list) else _count(devices)
        return cluster_of(asked, per_node * converted("whole>=1", nodes), converted("whole>=1", nodes))
    except Wrong:
        raise keys.wrong("trainer.devices", (devices, nodes), "a number of GPUs, a list of them, or 'auto'") from None


def _count(devices: Any) -> int:
    if isinstance(devices, str) and "," in devices:
        return len([one for one in devices.split(",") if one.strip()])
    return int(converted("whole>=1", devices))


def _fsdp(keys: Keys, asked: Asked, half: str | None) -> dict[str, Any]:
    at = "FSDPStrategy"
    strategy = enum_of(keys, f"{at}.sharding_strategy", SHARDING_STRATEGIES)
    plan: dict[str, Any] = {
        "api": "fsdp1", "sharding_strategy": strategy, "param_dtype": half, "reduce_dtype": half,
        "wrap": wrap_of(keys, f"{at}.auto_wrap_policy"), "forward_prefetch": keys[f"{at}.forward_prefetch"],
        "limit_all_gathers": keys[f"{at}.limit_all_gathers"], "backward_prefetch": _prefetch(keys),
    }  # fmt: skip
    plan["cpu_offload"] = offloads(keys[f"{at}.cpu_offload"])
    if f"{at}.mixed_precision" in keys:
        plan |= dtypes_of(keys, f"{at}.mixed_precision")
    if f"{at}.activation_checkpointing_policy" in keys or f"{at}.activation_checkpointing" in keys:
        _ = keys[f"{at}.activation_checkpointing_policy"], keys[f"{at}.activation_checkpointing"]
        plan["activation_checkpointing"] = "full"
        keys.remarks.append(f"What {keys.file} checkpoints is taken to be each block.")
    if (mesh := keys[f"{at}.device_mesh"]) and "shard_size" not in asked.given:
        if len(mesh) != 2 or not all(type(size) is int and size > 0 for size in mesh):
            raise keys.wrong(f"{at}.device_mesh", mesh, "two numbers: replicas, and shards of each")
        plan["shard_size"] = mesh[1]
    elif "HYBRID" in strategy and "shard_size" not in asked.given:
        nodes = keys["trainer.num_nodes"]
        gpus = _gpus(keys, Asked()).get("gpus")
        if gpus is None:
            raise ValueError(
                f"{keys.where}: hybrid sharding shards within a node, whose GPUs it does not say; give shard_size"
            )
        plan["shard_size"] = gpus // int(nodes)
    return plan


def _prefetch(keys: Keys) -> str:
    dotted = "FSDPStrategy.backward_prefetch"
    if dotted in keys.given and keys.given[dotted] is None:
        keys.read.append(dotted)
        return "none"
    return enum_of(keys, dotted, BACKWARD_PREFETCHES)


def _model_parallel(keys: Keys, asked: Asked, said: Said, precision: str) -> dict[str, Any]:
    """FSDP2, as the program's own function applies it: units are taken to be blocks."""
    tensor, data = (keys[f"ModelParallelStrategy.{what}_parallel_size"] for what in ("tensor", "data"))
    if tensor != 1:
        why = "auto is all GPUs of a node; " * (tensor == "auto") + "tensor parallelism is not simulated"
        raise keys.wrong("ModelParallelStrategy.tensor_parallel_size", tensor, "1", why)
    gpus = asked.gpus or said.cluster.get("gpus")
    if data != "auto" and gpus is None:
        said.cluster = {"gpus": data}
    elif data not in ("auto", gpus) and asked.gpus is None:
        raise keys.wrong("ModelParallelStrategy.data_parallel_size", data, f"{gpus}, devices times num_nodes")
    keys.remarks.append(
        f"What {keys.file} shards is in its model's own code: taken to be fully_shard on each block and the root, "
        f"without a MixedPrecisionPolicy; --param-dtype and others say otherwise."
    )
    if precision.endswith("-mixed"):
        keys.remarks.append(
            f"With {precision} {keys.file} gathers fp32 and computes under torch.autocast; here in fp32 too."
        )
    return {"api": "fsdp2", "wrap": "block", "param_dtype": None, "reduce_dtype": None}


def _zero(keys: Keys, asked: Asked, said: Said, half: str | None) -> dict[str, Any]:
    at = "DeepSpeedStrategy"
    if f"{at}.config" in keys:
        auto = {"bf16.enabled": half == "bf16", "fp16.enabled": half == "fp16"}
        return deepspeed_of(keys[f"{at}.config"], asked, said.cluster, keys, auto)
    optimizer, parameters = ("cpu" if keys[f"{at}.offload_{what}"] else "none" for what in ("optimizer", "parameters"))
    clips = keys["trainer.gradient_clip_val"] is not None
    return plan_of_zero(
        Zero(at, keys[f"{at}.stage"], half, None, keys[f"{at}.reduce_bucket_size"], optimizer, parameters, clips=clips),
        keys,
    )


def _clipping(keys: Keys, strategy: str) -> dict[str, Any]:
    value = keys["trainer.gradient_clip_val"]
    if strategy == "DeepSpeedStrategy":
        return {}
    if not value:
        return {"clip_grad_norm": False}
    if keys["trainer.gradient_clip_algorithm"] == "value":
        keys.remarks.append(f"{keys.file} clips each gradient by itself, which is not timed.")
        return {"clip_grad_norm": False}
    if strategy == "FSDPStrategy":
        raise keys.wrong("trainer.gradient_clip_val", value, "left out", "Lightning refuses to clip by norm with FSDP")
    return {"clip_grad_norm": True}


def _batch(keys: Keys) -> dict[str, int]:
    """The batch of a loader, where the data's arguments have one of that name."""
    table = keys["data"]
    inner = arguments_of(table) if table else {}
    for name in ("micro_batch_size", "batch_size"):
        if name in inner:
            try:
                found = int(converted("whole>=1", inner[name]))
            except Wrong:
                raise keys.wrong("data", inner[name], f"{name} as a whole number >= 1") from None
            keys.remarks.append(f"{name} of data of {keys.file} is taken to be each GPU's micro-batch.")
            return {"micro_batch": found}
    return {}
