"""A state as torchtitan's TOML: keys of ``JobConfig`` in torchtitan 0.2.2, the last version that reads TOML."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from fsdp_sim.forms.state import State
from fsdp_sim.spec import Model, Plan
from fsdp_sim.spec.catalogue import tables
from fsdp_sim.spec.torchtitan import TABLE, model_of_flavor

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
RESHARD: dict[object, str] = {None: "default", True: "always", False: "never"}
SAID = (  # fields that the keys below say; how torchtitan computes (stack) is its own, and run_train.sh's its allocator
    "api", "micro_batch", "grad_accum", "seq_len", "param_dtype", "reduce_dtype", "cpu_offload", "shard_size", "stack",
    "expert_parallel", "reshard_after_forward", "activation_checkpointing", "compile", "optimizer", "optimizer_impl",
    "clip_grad_norm", "expandable_segments",
)  # fmt: skip
UNITS = "torchtitan makes units of the embedding and of the last norm with the head; here the root holds them."


def torchtitan_toml(state: State) -> str:
    """The run as torchtitan takes it. What it has no key for is told in comments.

    Raises:
        ValueError: torchtitan has no such way to train.
    """
    plan, cluster, model = state.plan, state.cluster, state.model
    if plan.api not in ("fsdp2", "ddp"):
        raise ValueError(f"torchtitan trains with fsdp2 or ddp, and api is {plan.api!r}")
    if plan.optimizer != "adamw":
        raise ValueError(f"torchtitan 0.2.2 has Adam and AdamW, and optimizer is {plan.optimizer!r}")
    unsaid = [f"{name} = {getattr(plan, name)!r}" for name in _unsaid(plan)]
    named = _flavor(model)
    shards = 1 if plan.api == "ddp" else plan.shard_size or cluster.gpus
    kept, keep = plan.activation_checkpointing, plan.reshard_after_forward
    sections: dict[str, dict[str, Any]] = {
        "model": dict(zip(("name", "flavor"), named, strict=True)) if named else {},
        "optimizer": {"name": "AdamW", "implementation": plan.optimizer_impl},
        "training": {
            "local_batch_size": plan.micro_batch,
            "global_batch_size": plan.micro_batch * plan.grad_accum * cluster.gpus,
            "seq_len": plan.seq_len,
            "dtype": DTYPES.get(model.dtype, model.dtype),
            "mixed_precision_param": DTYPES.get(plan.param_dtype or model.dtype, plan.param_dtype),
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": plan.cpu_offload,
        },
        "parallelism": {
            "data_parallel_replicate_degree": cluster.gpus // shards,
            "data_parallel_shard_degree": shards,
            **({"expert_parallel_degree": plan.expert_parallel} if plan.expert_parallel > 1 else {}),
            "fsdp_reshard_after_forward": "default" if type(keep) is int else RESHARD[keep],
        },
        "activation_checkpoint": {
            "mode": "none" if kept is None else "full" if kept == "full" else "selective",
            "selective_ac_option": str(kept) if isinstance(kept, int) else "op",
        },
        "compile": {"enable": plan.compile, "components": ["model"]},
    }  # fmt: skip
    remarks = [f"{model.name} on {cluster.gpus} x {cluster.gpu.name}, for torchtitan 0.2.2.", UNITS]
    remarks += [f"torchtitan has no flavor of these dimensions: register {model.name}."] if not named else []
    remarks += [f"torchtitan has no key for {'; '.join(unsaid)}."] if unsaid else []
    if plan.expert_parallel > 1 and (plan.forward_prefetch, plan.backward_prefetch) != (1, 1):
        remarks.append(
            "With experts shared out torchtitan prefetches the next block and its experts, forward and back."
        )
    remarks += ["torchtitan clips gradients in every step; here they are not."] if not plan.clip_grad_norm else []
    lines = [f"# {remark}" for remark in remarks]
    for section, keys in sections.items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _unsaid(plan: Plan) -> list[str]:
    """Fields that differ from torch's defaults and have no key."""
    unsaid = [f.name for f in fields(Plan) if f.name not in SAID and getattr(plan, f.name) != f.default]
    if plan.expert_parallel > 1:  # then it prefetches one block ahead
        unsaid = [name for name in unsaid if not name.endswith("_prefetch") or getattr(plan, name) != 1]
    if type(plan.reshard_after_forward) is int:
        unsaid.append("reshard_after_forward")
    if isinstance(plan.activation_checkpointing, tuple):
        unsaid.append("activation_checkpointing")
    if plan.reduce_dtype not in (None, "fp32") or plan.param_dtype == "fp16":
        unsaid.append("reduce_dtype" if plan.param_dtype != "fp16" else "param_dtype")
    return unsaid


def _flavor(model: Model) -> tuple[str, str] | None:
    """The name and the flavor under which torchtitan has a model of these dimensions."""
    for name, flavors in tables(TABLE).items():
        for flavor in flavors:
            known = model_of_flavor({"model": {"name": name, "flavor": flavor}}, TABLE)
            if replace(known, name=model.name) == model:
                return name, flavor
    return None
