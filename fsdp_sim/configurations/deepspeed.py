"""DeepSpeed's ZeRO JSON, and the plan that would equal it: stage 0 is DDP, 1 and 2 are zero1 and zero2, 3 is FSDP2.

Stages 1 and 2 keep parameters in the dtype of compute, and a rank its part of an fp32 copy with the optimizer's states.

Source: deepspeed 0.19.8, `deepspeed.runtime.config.DeepSpeedConfig` (`_set_batch_related_parameters` for the batch),
`deepspeed.runtime.zero.config.DeepSpeedZeroConfig`, `DeepSpeedEngine.communication_data_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fsdp_sim.configurations.keys import Keys, schema_of
from fsdp_sim.configurations.said import Asked, Said, dtype_of, need_gpus
from fsdp_sim.configurations.texts import text_of_file, tree_of
from fsdp_sim.spec import API_OF_ZERO

OPTIMIZERS = {"Adam": "adamw", "AdamW": "adamw", "SGD": "sgd"}
BYTES = {"fp16": 2, "bf16": 2}


class Zero(NamedTuple):
    """What decides of ZeRO's step. ``section`` is where the file says it, ``dtype`` None computes in fp32."""

    section: str
    stage: int
    dtype: str | None
    reduce_dtype: str | None = None
    bucket_numel: int = 500_000_000
    offload_optimizer: str = "none"
    offload_param: str = "none"
    hpz: int = 1
    clips: bool = True
    autocast: bool = False


def plan_of_zero(zero: Zero, keys: Keys) -> dict[str, Any]:
    """The fields of `Plan`; what differs is among the remarks of `keys`.

    Raises:
        ValueError: what stage 1 or 2 offloads is not simulated.
    """
    say, where = keys.remarks.append, keys.file
    plan: dict[str, Any] = {
        "api": API_OF_ZERO[zero.stage], "param_dtype": zero.dtype, "reduce_dtype": zero.reduce_dtype or zero.dtype
    }  # fmt: skip
    offloads = [
        name for name, to in (("optimizer", zero.offload_optimizer), ("param", zero.offload_param)) if to == "cpu"
    ]
    if zero.stage < 3:
        if offloads:
            raise ValueError(
                f"{keys.where}: {zero.section} offloads ({', '.join(offloads)}) with ZeRO stage {zero.stage}, "
                f"which is not simulated; stage 3 with both is Plan(cpu_offload=True)"
            )
        if zero.stage:
            n_bytes = BYTES.get(plan["reduce_dtype"] or "fp32", 4)
            plan["bucket_cap_mb"] = zero.bucket_numel * n_bytes / 2**20
    else:
        plan |= {"wrap": "block", "reshard_after_forward": True, "cpu_offload": bool(offloads)}
        say(
            f"ZeRO stage 3 of {where} is simulated as FSDP2: ZeRO gathers parameter by parameter, ahead by "
            f"stage3_prefetch_bucket_size, and keeps those below stage3_param_persistence_threshold whole; here each "
            f"block is a unit, gathered one ahead."
        )
        if zero.hpz > 1:
            plan["reshard_after_forward"] = zero.hpz
            say(
                f"zero_hpz_partition_size of {where} keeps a copy of the parameters in each {zero.hpz} ranks for "
                f"backward: reshard_after_forward={zero.hpz} does so, after each forward."
            )
        if len(offloads) == 1:
            other = "parameters" if offloads == ["optimizer"] else "the optimizer"
            say(
                f"{where} offloads the {offloads[0]} alone; FSDP2's cpu_offload, which is simulated, moves {other} too."
            )
    if zero.stage == 2 and zero.clips:
        say(f"{where} clips gradients, which is not simulated with ZeRO stage 2.")
    else:
        plan["clip_grad_norm"] = zero.clips
    if zero.dtype is not None and not zero.autocast:
        if zero.stage == 3:
            say(
                f"ZeRO of {where} keeps {zero.dtype} parameters beside an fp32 copy with the optimizer's states; here "
                f"the fp32 parameters are cast, and gathers are in {zero.dtype}."
            )
        elif zero.stage:
            keys.halved = zero.dtype
    return plan


def with_master_weights(keys: Keys, said: Said, given: Mapping[str, Any]) -> None:
    """The plan of stage 1 or 2 whose parameters have 2 bytes (`Keys.halved`), unless an optimizer is given beside."""
    assert keys.halved is not None
    optimizer = said.plan.get("optimizer", "adamw")
    if optimizer == "adamw" and "optimizer" not in given:
        said.plan |= {"optimizer": "adamw_master_weights", "optimizer_impl": "fused"}  # of one flat tensor
        said.dims["dtype"] = keys.halved
        return
    more = {"zero1": 6, "zero2": 4}[said.plan["api"]]  # fp32 parameters and gradients that are whole, and a copy
    keys.remarks.append(
        f"ZeRO of {keys.file} keeps {keys.halved} parameters beside an fp32 copy with the optimizer's states; here, "
        f"with {given.get('optimizer', optimizer)}, fp32 parameters are cast, which takes up to {more} bytes of memory "
        f"more for each."
    )


def read(keys: Keys, asked: Asked) -> Said:
    """Of a file that says all itself: where it leaves a value to a trainer (``auto``), a remark says what is taken."""
    return Said(plan=_plan(keys, asked, {}, {}))


def deepspeed_of(
    given: str | Mapping[str, Any], asked: Asked, cluster: dict[str, Any], outer: Keys, auto: Mapping[str, Any]
) -> dict[str, Any]:
    """The plan of the JSON that another configuration names or holds; what it says besides goes to that one's keys.

    Args:
        auto: by key, what the other configuration says where the JSON says ``auto``.

    Raises:
        ValueError: there is no such file, or see `read`.
    """
    where, tree, passed_over = f"deepspeed of {outer.file}", given, ""
    if isinstance(given, str):
        where = str(_found(asked.folder, given))
        try:
            tree, passed_over = tree_of(text_of_file(where), where, ".json")
        except OSError as error:
            raise ValueError(
                f"{outer.where}: the DeepSpeed file {where} cannot be read: {error.strerror}; put it there"
            ) from None
    keys = Keys(schema_of("deepspeed"), tree, where)  # type: ignore[arg-type]
    if passed_over:
        keys.remarks.append(f"{keys.file} {passed_over}")
    plan = _plan(keys, asked, cluster, auto)
    outer.remarks += [*keys.sentences, *keys.remarks]
    outer.halved = keys.halved
    return plan


def _found(folder: Path, given: str) -> Path:
    """A path in a file: from the file's folder, or from one of those above, from which its program is started."""
    places = [folder, *folder.resolve().parents[:4], Path()]
    return next((place / given for place in places if (place / given).is_file()), folder / given)


def _plan(keys: Keys, asked: Asked, cluster: dict[str, Any], auto: Mapping[str, Any]) -> dict[str, Any]:
    zero, offload = "zero_optimization", "zero_optimization.offload_"

    def value_of(name: str, instead: Any) -> Any:
        """A key's value; where it is left to the trainer, what that says, or else ``instead``."""
        value = keys[name]
        if value != "auto":
            return value
        if name not in auto:
            keys.remarks.append(f"{name} of {keys.file} is left to the trainer (auto); taken to be {instead}.")
        return auto.get(name, instead)

    dtype = next((name for name in ("bf16", "fp16") if value_of(f"{name}.enabled", True)), None)
    if keys["torch_autocast.enabled"]:
        keys.remarks.append(f"{keys.file} computes under torch.autocast; here parameters are cast before gathers.")
        dtype = dtype_of(keys["torch_autocast.dtype"])
    plan = plan_of_zero(
        Zero(
            zero, keys[f"{zero}.stage"], dtype, keys["communication_data_type"],
            value_of(f"{zero}.reduce_bucket_size", 500_000_000), keys[f"{offload}optimizer.device"],
            keys[f"{offload}param.device"], keys[f"{zero}.zero_hpz_partition_size"],
            clips=value_of("gradient_clipping", 1.0) != 0, autocast=keys["torch_autocast.enabled"],
        ),
        keys,
    )  # fmt: skip
    kind = keys["optimizer.type"]
    if kind in OPTIMIZERS:
        momentum = kind == "SGD" and (keys["optimizer.params"] or {}).get("momentum")
        plan["optimizer"] = "sgd_momentum" if momentum else OPTIMIZERS[kind]
    return plan | _batch(keys, asked, cluster, auto)


def _batch(keys: Keys, asked: Asked, cluster: dict[str, Any], auto: Mapping[str, Any]) -> dict[str, int]:
    """Micro-batch and accumulation, by the rules of `_set_batch_related_parameters`."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    total, micro, steps = (auto.get(name) if keys[name] in ("auto", None) else keys[name] for name in names)
    micro, steps = asked.given.get("micro_batch", micro), asked.given.get("grad_accum", steps)
    if total is None:
        left = [name for name, value in zip(names[1:], (micro, steps), strict=True) if value is None]
        if left:
            keys.remarks.append(f"{keys.file} does not say {' and '.join(left)}; taken to be 1.")
        return {"micro_batch": micro or 1, "grad_accum": steps or 1}
    gpus = need_gpus(keys, asked, cluster, "the micro-batch of train_batch_size")
    if micro is None and steps is None:
        steps = 1
    product = gpus * (micro or 1) * (steps or 1)
    if total % product or (micro and steps and total != product):
        raise ValueError(
            f"{keys.where}: train_batch_size is {total}, which is not {gpus} GPUs times micro-batches of "
            f"{micro or 'any size'} times {steps or 'any number of'} micro-batches; give another micro_batch or gpus"
        )
    return {"micro_batch": micro or total // product, "grad_accum": steps or total // product}
