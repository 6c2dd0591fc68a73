"""verl's YAML for its SFT trainer, and the update of the actor of its PPO trainer, both with the FSDP engine.

Source: verl 0.9.1, `workers.engine.fsdp.transformer_impl.FSDPEngine` (``_build_fsdp_module``), `utils.fsdp_utils`
(`apply_fsdp2`, `get_fsdp_wrap_policy`), `workers.engine.fsdp.utils.get_sharding_strategy`,
`trainer.ppo.ray_trainer` (a mini-batch has ``ppo_mini_batch_size`` prompts, with ``rollout.n`` answers each).
"""

from __future__ import annotations

from typing import Any

from fsdp_sim.configurations.adapters import lora_plan
from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.loaded import chunked_loss, dims_of
from fsdp_sim.configurations.said import Asked, Said, cluster_of, dtype_of, need_gpus

ACTOR = "actor_rollout_ref"


def read(keys: Keys, asked: Asked) -> Said:
    nodes, per_node = keys["trainer.nnodes"], keys["trainer.n_gpus_per_node"]
    said = Said(cluster=cluster_of(asked, nodes * per_node if per_node else None, nodes))
    ppo = any(keys.below(ACTOR))
    model, optim = (f"{ACTOR}.model", f"{ACTOR}.actor.optim") if ppo else ("model", "optim")
    engine = f"{ACTOR}.actor.fsdp_config" if ppo else "engine"
    api = {"fsdp": "fsdp1", "fsdp2": "fsdp2"}[keys[f"{ACTOR}.actor.strategy" if ppo else "engine.strategy"]]
    said.model = keys[f"{model}.path"]
    plan = _engine(keys, engine, api) | _group(keys, asked, said, engine, api)
    plan |= _optimizer(keys, optim) | _model(keys, model, api)
    plan |= _ppo_batch(keys, asked, said) if ppo else _sft_batch(keys, asked, said)
    clips = keys[f"{ACTOR}.actor.grad_clip" if ppo else "optim.clip_grad"]
    plan["clip_grad_norm"] = clips is not None and clips > 0
    if keys[f"{model}.use_fused_kernels"]:
        plan |= chunked_loss(keys, "use_fused_kernels", asked.given.get("seq_len", plan.get("seq_len", 1024)))
    if plan["grad_accum"] > 1 and keys[f"{engine}.use_no_sync_for_gradient_accumulation"]:
        plan["requires_gradient_sync"] = "last"
    if ppo:
        keys.remarks.append(
            f"Of {keys.file} one update of the actor is simulated: what a rollout generates, the reference, the critic "
            f"and rewards are not."
        )
    dtype = dtype_of(keys[f"{engine}.model_dtype"])
    said.plan = plan
    said.dims = dims_of(keys, plan, dtype) if plan.get("lora_rank") else {"dtype": dtype}
    return said


def _engine(keys: Keys, at: str, api: str) -> dict[str, Any]:
    """`_build_fsdp_module`: precision, units, prefetch and offload."""
    mixed = keys[f"{at}.mixed_precision"] or {}
    plan: dict[str, Any] = {"api": api, "wrap": _wrap(keys, at, api)}
    for name, default in (("param_dtype", "bf16"), ("reduce_dtype", "fp32")):
        try:
            plan[name] = dtype_of(str(mixed.get(name, default)))
        except ValueError:
            raise keys.wrong(f"{at}.mixed_precision", mixed[name], "bf16, fp16 or fp32") from None
    if api == "fsdp2":
        plan |= {
            "reshard_after_forward": keys[f"{at}.reshard_after_forward"],
            "forward_prefetch": 1 if keys[f"{at}.forward_prefetch"] else None,
            "cpu_offload": keys[f"{at}.offload_policy"],
        }
    else:
        plan["forward_prefetch"] = keys[f"{at}.forward_prefetch"]
        if keys[f"{at}.offload_policy"]:
            keys.remarks.append(f"offload_policy of {keys.file} changes nothing with strategy fsdp.")
    if keys[f"{at}.param_offload"] or keys[f"{at}.optimizer_offload"]:
        keys.remarks.append(
            f"{keys.file} moves the model or the optimizer to the CPU between updates, which is not timed; within one "
            f"they are on the GPU."
        )
    return plan


def _wrap(keys: Keys, at: str, api: str) -> str | int:
    policy = keys[f"{at}.wrap_policy"] or {}
    least = policy.get("min_num_params") or 0
    if policy.get("disable"):
        return "root"
    if api == "fsdp1" and type(least) is int and least > 0:
        return least
    if named := policy.get("transformer_layer_cls_to_wrap"):
        keys.remarks.append(f"{named} of {keys.file} is taken to be the model's block.")
    return "block"


def _group(keys: Keys, asked: Asked, said: Said, at: str, api: str) -> dict[str, Any]:
    """The ranks that shard: ``fsdp_size``, with replicas where that is fewer than all."""
    size, keeps = keys[f"{at}.fsdp_size"], not keys[f"{at}.reshard_after_forward"]
    whole = {"sharding_strategy": "SHARD_GRAD_OP" if keeps else "FULL_SHARD"} if api == "fsdp1" else {}
    if size < 1 or "shard_size" in asked.given:
        return whole
    gpus = need_gpus(keys, asked, said.cluster, "whether fsdp_size makes replicas")
    if size >= gpus:
        return whole
    if gpus % size:
        raise keys.wrong(f"{at}.fsdp_size", size, f"-1 or a divisor of {gpus} GPUs")
    hybrid = {"sharding_strategy": "_HYBRID_SHARD_ZERO2" if keeps else "HYBRID_SHARD"} if api == "fsdp1" else {}
    return {"shard_size": size} | hybrid


def _optimizer(keys: Keys, at: str) -> dict[str, Any]:
    name, package = keys[f"{at}.optimizer"], keys[f"{at}.optimizer_impl"]
    more = keys[f"{at}.override_optimizer_config"] or {}
    found = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd", "AdamW8bit": "adamw_8bit", "Muon": "muon"}[name]
    if found == "sgd" and more.get("momentum"):
        found = "sgd_momentum"
    foreach = package == "torch.optim" and not more.get("fused") and found in ("adamw", "sgd", "sgd_momentum")
    return {"optimizer": found, "optimizer_impl": "foreach" if foreach else "fused"}


def _model(keys: Keys, at: str, api: str) -> dict[str, Any]:
    plan: dict[str, Any] = {"stack": "hf-trainer"}
    if keys[f"{at}.enable_gradient_checkpointing"]:
        plan["activation_checkpointing"] = "full"
    if keys[f"{at}.enable_activation_offload"]:
        if api != "fsdp2":
            raise keys.wrong(f"{at}.enable_activation_offload", True, "False", "it is simulated with fsdp2 alone")
        plan["activation_offload"] = "streams"
    if rank := keys[f"{at}.lora_rank"]:
        plan |= lora_plan(keys, rank, keys[f"{at}.target_modules"], f"{at}.target_modules")
    if keys[f"{at}.use_liger"]:
        plan["rms_norm"] = "fused"
    return plan


def _sft_batch(keys: Keys, asked: Asked, said: Said) -> dict[str, Any]:
    total, length = keys["data.train_batch_size"], keys["data.max_length"]
    if length is None or total is None:
        missing = "data.max_length" if length is None else "data.train_batch_size"
        value = 1024 if length is None else 256
        keys.defaults[missing] = value
        length, total = length or 1024, total or 256
    tokens = keys["data.max_token_len_per_gpu"] or 8192 if keys["data.use_dynamic_bsz"] else None
    return _batch(keys, asked, said, total, length, keys["data.micro_batch_size_per_gpu"] or 4, tokens)


def _ppo_batch(keys: Keys, asked: Asked, said: Said) -> dict[str, Any]:
    at = f"{ACTOR}.actor"
    lengths = [keys[f"data.max_{what}_length"] for what in ("prompt", "response")]
    for what, value in zip(("prompt", "response"), lengths, strict=True):
        if value is None:
            keys.defaults[f"data.max_{what}_length"] = 512
    length = sum(value or 512 for value in lengths)
    tokens = keys[f"{at}.ppo_max_token_len_per_gpu"] if keys[f"{at}.use_dynamic_bsz"] else None
    micro = keys[f"{at}.ppo_micro_batch_size_per_gpu"]
    if micro is None and (total := keys[f"{at}.ppo_micro_batch_size"]):
        micro = max(1, total // need_gpus(keys, asked, said.cluster, "the micro-batch of ppo_micro_batch_size"))
    if micro is None and tokens is None:
        raise ValueError(f"{keys.where}: it gives neither ppo_micro_batch_size_per_gpu nor use_dynamic_bsz; give one")
    sequences = keys[f"{at}.ppo_mini_batch_size"] * keys[f"{ACTOR}.rollout.n"]
    return _batch(keys, asked, said, sequences, length, micro or 1, tokens)


def _batch(
    keys: Keys, asked: Asked, said: Said, total: int, length: int, micro: int, tokens: int | None
) -> dict[str, Any]:
    """Micro-batches of ``total`` sequences; where ``tokens`` is given, each is filled up to so many."""
    gpus = need_gpus(keys, asked, said.cluster, "the number of micro-batches")
    if tokens is not None:
        micro = max(1, tokens // length)
        keys.remarks.append(
            f"{keys.file} fills micro-batches up to {tokens} tokens; taken to be {micro} whole sequences of {length}."
        )
    micro = asked.given.get("micro_batch", micro)
    each = total // gpus
    if total % gpus or (tokens is None and each % micro):
        raise ValueError(
            f"{keys.where}: {total} sequences of a step are not {gpus} GPUs times micro-batches of {micro}; give "
            f"another micro_batch or gpus"
        )
    return {"micro_batch": min(micro, each), "grad_accum": -(-each // micro), "seq_len": length}
