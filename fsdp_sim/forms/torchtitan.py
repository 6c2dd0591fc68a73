"""A state as torchtitan's TOML: keys of ``JobConfig`` in torchtitan 0.2.2, the last version that reads TOML."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

from fsdp_sim.forms.state import FormState
from fsdp_sim.spec import Model, Plan
from fsdp_sim.spec.catalogue import tables
from fsdp_sim.spec.torchtitan import DTYPES, FLOAT8, READ, RESHARD, TABLE, model_of_flavor

SAID = {value: word for word, value in DTYPES.items() if word in ("float32", "bfloat16")}
RESHARD_WORD: dict[bool | int | None, str] = {value: word for word, value in RESHARD.items()}


def torchtitan_toml(state: FormState) -> str:
    """The run as torchtitan takes it. What it has no key for is told in comments.

    Raises:
        ValueError: torchtitan has no such way to train.
    """
    plan, cluster, model = state.plan, state.cluster, state.model
    if plan.api not in ("fsdp2", "ddp"):
        raise ValueError(f"torchtitan trains with fsdp2 or ddp, and api is {plan.api!r}")
    if plan.optimizer != "adamw":
        raise ValueError(f"torchtitan 0.2.2 has Adam and AdamW, and optimizer is {plan.optimizer!r}")
    if model.dtype not in SAID:
        raise ValueError(
            f"torchtitan keeps parameters in fp32 or bf16, and the dtype of {model.name} is {model.dtype!r}"
        )
    named = _flavor(model)
    shards = 1 if plan.api == "ddp" else plan.shard_size or cluster.gpus
    kept, keep = plan.activation_checkpointing, plan.reshard_after_forward
    compiled = [name for name, is_so in (("model", plan.compile), ("loss", plan.cross_entropy == "compiled")) if is_so]
    sections: dict[str, dict[str, Any]] = {
        "model": dict(zip(("name", "flavor"), named, strict=True)) if named else {},
        "optimizer": {"name": "AdamW", "implementation": plan.optimizer_impl},
        "training": {
            "local_batch_size": plan.micro_batch,
            "global_batch_size": plan.micro_batch * plan.grad_accum * cluster.gpus,
            "seq_len": plan.seq_len,
            "dtype": SAID[model.dtype],
            "mixed_precision_param": SAID.get(plan.param_dtype or model.dtype, "bfloat16"),
            "mixed_precision_reduce": "float32",
            "enable_cpu_offload": plan.cpu_offload,
        },
        "parallelism": {
            "data_parallel_replicate_degree": cluster.gpus // shards,
            "data_parallel_shard_degree": shards,
            **({"expert_parallel_degree": plan.expert_parallel} if plan.expert_parallel > 1 else {}),
            "fsdp_reshard_after_forward": "default" if type(keep) is int else RESHARD_WORD[keep],
        },
        "activation_checkpoint": {
            "mode": "none" if kept is None else "full" if kept == "full" else "selective",
            "selective_ac_option": str(kept) if isinstance(kept, int) else "op",
        },
        "compile": {"enable": bool(compiled), **({"components": compiled} if compiled else {})},
    }  # fmt: skip
    float8 = _float8(plan, model)
    if float8:
        sections["model"]["converters"] = [FLOAT8]
    inside = {"quantize": {"linear": {"float8": float8}}}
    there = _effective(Plan.from_torchtitan(sections | inside, cluster.gpus), model, cluster.gpus)
    here = _effective(plan, model, cluster.gpus)
    unsaid = [f"{name} = {here[name]!r} (there {there[name]!r})" for name in here if here[name] != there[name]]
    remarks = [f"{model.name} on {cluster.gpus} x {cluster.gpu.name}, for torchtitan 0.2.2."]
    remarks += [f"torchtitan has no flavor of these dimensions: register {model.name}."] if not named else []
    remarks += [f"torchtitan has no key for {'; '.join(unsaid)}."] if unsaid else []
    lines = [f"# {remark}" for remark in remarks]
    for section, keys in (sections | ({FLOAT8: float8} if float8 else {})).items():
        lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _float8(plan: Plan, model: Model) -> dict[str, Any]:
    """The section of its converter, which leaves out what a plan does not compute in fp8; none without fp8."""
    if plan.fp8 is None or not READ[FLOAT8]["recipe_name"].allowed.test(plan.fp8):
        return {}
    gathers = {
        "enable_fsdp_float8_all_gather": plan.fp8_all_gather,
        "precompute_float8_dynamic_scale_for_fsdp": plan.fp8_precompute_scale,
    }
    recipe = {"recipe_name": plan.fp8} if plan.fp8 != "tensorwise" else gathers
    return recipe | {"filter_fqns": ["output", "router.gate"] if model.n_expert else ["output"]}


def _effective(plan: Plan, model: Model, gpus: int) -> dict[str, Any]:
    """The fields of a plan; what is left to a default that the model or the cluster gives, as that."""
    found = {f.name: getattr(plan, f.name) for f in fields(Plan)}
    param_dtype = plan.param_dtype or model.dtype
    shards = None if plan.shard_size == gpus else plan.shard_size
    return found | {
        "param_dtype": param_dtype, "reduce_dtype": plan.reduce_dtype or param_dtype, "shard_size": shards
    }  # fmt: skip


def _flavor(model: Model) -> tuple[str, str] | None:
    """The name and the flavor under which torchtitan has a model of these dimensions."""
    for name, flavors in tables(TABLE).items():
        for flavor in flavors:
            known = model_of_flavor({"model": {"name": name, "flavor": flavor}}, TABLE)
            if replace(known, name=model.name, dtype=model.dtype) == model:
                return name, flavor
    return None
