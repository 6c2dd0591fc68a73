"""A state as the YAML of ``accelerate launch --config_file``. Keys are those that Accelerate 1.15 reads."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from fsdp_sim.forms.state import FormState
from fsdp_sim.spec import Plan

SAID = (  # fields that the keys below say
    "api", "param_dtype", "reduce_dtype", "cpu_offload", "shard_size", "reshard_after_forward", "wrap", "compile",
    "activation_checkpointing", "sharding_strategy", "forward_prefetch", "backward_prefetch", "stack",
)  # fmt: skip
EACH_BATCH = (
    "Accelerate reduces gradients with the last micro-batch alone and holds them whole until then; as simulated here, "
    "with each, if the script gives Accelerator gradient_accumulation_plugin=GradientAccumulationPlugin("
    "num_steps={}, sync_each_batch=True)."
)
SCRIPT = ("micro_batch", "seq_len", "grad_accum", "optimizer", "optimizer_impl", "clip_grad_norm")  # the script's own
UNITS = (
    "With FSDP2 Accelerate makes units of the embedding and of the last norm with the head (wrap=embed_block_head); "
    "here the root holds them."
)


def accelerate_yaml(state: FormState) -> str:
    """The run as Accelerate takes it; what belongs to the script, and what it has no key for, is told in comments.

    Raises:
        ValueError: Accelerate has no such way to train.
    """
    plan, cluster = state.plan, state.cluster
    if plan.api not in ("fsdp2", "fsdp1", "ddp"):
        raise ValueError(f"Accelerate trains with fsdp2, fsdp1 or ddp, and api is {plan.api!r}")
    top: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if plan.api == "ddp" else "FSDP",
        "mixed_precision": {None: "no", "fp32": "no"}.get(plan.param_dtype, plan.param_dtype),
        "num_machines": cluster.nodes,
        "num_processes": cluster.gpus,
        "machine_rank": 0,
        "rdzv_backend": "c10d",
    }
    if plan.compile:
        top["dynamo_config"] = {"dynamo_backend": "INDUCTOR", "dynamo_use_regional_compilation": True}
    if plan.api != "ddp":
        top["fsdp_config"] = {**_wrapping(plan), **(_fsdp2(plan) if plan.api == "fsdp2" else _fsdp1(plan))}
    if plan.api == "fsdp2" and plan.shard_size:
        top["parallelism_config"] = {
            "parallelism_config_dp_replicate_size": cluster.gpus // plan.shard_size,
            "parallelism_config_dp_shard_size": plan.shard_size,
        }
    unsaid = [f.name for f in fields(Plan)
              if f.name not in (*SAID, *SCRIPT) and getattr(plan, f.name) != f.default]  # fmt: skip
    if plan.requires_gradient_sync == "last":
        unsaid.remove("requires_gradient_sync")  # it is Accelerate's own way
    unsaid += [name for name in _half_said(plan) if getattr(plan, name) is not None]
    units = [UNITS] if plan.api == "fsdp2" and plan.wrap != "embed_block_head" else []
    remarks = [f"{state.model.name} on {cluster.gpus} x {cluster.gpu.name}, for Accelerate 1.15.", *units,
               "The script's own: " + "; ".join(f"{n} = {getattr(plan, n)!r}" for n in SCRIPT) + "."]  # fmt: skip
    half = plan.param_dtype not in (None, "fp32")
    if plan.api == "ddp" and half and (reduced := plan.reduce_dtype or plan.param_dtype) != state.model.dtype:
        remarks.append(
            f"Accelerate's DDP computes under autocast and reduces gradients in {state.model.dtype}, the dtype of the "
            f"parameters; reduce_dtype is {reduced}."
        )
    if plan.api != "ddp" and half and plan.reduce_dtype not in (None, plan.param_dtype):
        remarks.append(
            f"Accelerate reduces gradients in {plan.param_dtype} unless the script gives its plugin a "
            f"mixed_precision_policy; reduce_dtype is {plan.reduce_dtype}."
        )
    if plan.grad_accum > 1 and plan.requires_gradient_sync is True:
        remarks.append(EACH_BATCH.format(plan.grad_accum))
    if unsaid:
        remarks.append("Accelerate has no key for " + "; ".join(f"{n} = {getattr(plan, n)!r}" for n in unsaid) + ".")
    return "\n".join([*(f"# {remark}" for remark in remarks), *_yaml(top)]) + "\n"


def _wrapping(plan: Plan) -> dict[str, Any]:
    if isinstance(plan.wrap, int):
        return {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": plan.wrap}
    return {"fsdp_auto_wrap_policy": "NO_WRAP" if plan.wrap == "root" else "TRANSFORMER_BASED_WRAP"}


def _shared(plan: Plan) -> dict[str, Any]:
    return {
        "fsdp_offload_params": plan.cpu_offload,
        "fsdp_activation_checkpointing": plan.activation_checkpointing == "full",
    }


def _fsdp2(plan: Plan) -> dict[str, Any]:
    keep = plan.reshard_after_forward is False
    return {"fsdp_version": 2, "fsdp_reshard_after_forward": not keep, **_shared(plan)}


def _fsdp1(plan: Plan) -> dict[str, Any]:
    return {
        "fsdp_version": 1,
        # Not fsdp_reshard_after_forward: the launcher sets the strategy in any case, and it wins (accelerate 1.15.0,
        # `prepare_multi_gpu_env`, `FullyShardedDataParallelPlugin.__post_init__`).
        "fsdp_sharding_strategy": plan.sharding_strategy.removeprefix("_"),
        "fsdp_backward_prefetch": {None: "BACKWARD_PRE", "none": "NO_PREFETCH"}.get(
            plan.backward_prefetch, plan.backward_prefetch
        ),
        "fsdp_forward_prefetch": bool(plan.forward_prefetch),
        "fsdp_use_orig_params": True,
        **_shared(plan),
    }


def _half_said(plan: Plan) -> list[str]:
    """Fields of which Accelerate knows other values only."""
    names = []
    if plan.activation_checkpointing not in (None, "full"):
        names.append("activation_checkpointing")
    if type(plan.reshard_after_forward) is int:
        names.append("reshard_after_forward")
    if isinstance(plan.wrap, tuple):
        names.append("wrap")
    return names + (["forward_prefetch", "backward_prefetch"] if plan.api == "fsdp2" else [])


def _yaml(table: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in table.items():
        if isinstance(value, dict):
            lines += [f"{key}:", *(f"  {line}" for line in _yaml(value))]
        else:
            lines.append(f"{key}: {json.dumps(value)}")
    return lines
