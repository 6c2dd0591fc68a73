"""torch's own values of FSDP as a script or a YAML writes them: enums, `MixedPrecision`, `CPUOffload`, wrap policies.

Source: torch 2.13, `torch.distributed.fsdp` (`ShardingStrategy`, `BackwardPrefetch`, `MixedPrecision`,
`MixedPrecisionPolicy`, `CPUOffload`, `CPUOffloadPolicy`) and `torch.distributed.fsdp.wrap`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_sim.configurations.keys import Keys
from fsdp_sim.configurations.kinds import Wrong, converted
from fsdp_sim.configurations.said import dtype_of

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
BACKWARD_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST")


def enum_of(keys: Keys, dotted: str, names: tuple[str, ...]) -> str:
    """A member of one of torch's enums, as a text or as ``ShardingStrategy.FULL_SHARD``."""
    value = keys[dotted].rpartition(".")[2].upper()
    if value not in names:
        raise keys.wrong(dotted, keys[dotted], " or ".join(map(repr, names)))
    return str(value)


def arguments_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a class is given, in YAML or in Python."""
    inner = value.get("init_args", value)
    return inner if isinstance(inner, Mapping) else value


def offloads(value: bool | Mapping[str, Any]) -> bool:
    """Whether parameters are kept on the CPU: a flag, FSDP1's `CPUOffload` or FSDP2's `CPUOffloadPolicy`."""
    if isinstance(value, bool):
        return value
    if value.get("call") == "CPUOffloadPolicy":
        return True
    return bool(arguments_of(value).get("offload_params", value.get("arg0", False)))


def dtypes_of(keys: Keys, dotted: str) -> dict[str, str | None]:
    """``param_dtype`` and ``reduce_dtype`` of a `MixedPrecision` or a `MixedPrecisionPolicy`."""
    arguments, found = arguments_of(keys[dotted]), {}
    for place, field in enumerate(("param_dtype", "reduce_dtype")):
        value = arguments.get(field, arguments.get(f"arg{place}"))
        try:
            found[field] = None if value is None else dtype_of(str(value))
        except ValueError:
            raise keys.wrong(dotted, value, "torch.float32, torch.bfloat16 or torch.float16") from None
    return found | {"reduce_dtype": found["reduce_dtype"] or found["param_dtype"]}


def wrap_of(keys: Keys, dotted: str) -> str | int:
    """The units of a wrap policy: ``block``, ``root``, or at least how many parameters each has."""
    policy = keys[dotted]
    if policy is None:
        keys.remarks.append(f"{keys.file} has no auto_wrap_policy: the whole model is one unit.")
        return "root"
    if not isinstance(policy, Mapping):
        keys.remarks.append(f"{', '.join(policy)} of {keys.file} is taken to be the model's block.")
        return "block"
    arguments = arguments_of(policy)
    named = " ".join(str(value) for value in (policy.get("class_path"), policy.get("call"), policy.get("arg0")))
    if "size_based_auto_wrap_policy" in named:
        least = arguments.get("min_num_params", 100_000_000)
        try:
            return int(converted("whole>=1", least))
        except Wrong:
            raise keys.wrong(dotted, least, "a whole number >= 1") from None
    if "transformer_auto_wrap_policy" in named or "ModuleWrapPolicy" in named:
        keys.remarks.append(f"What {dotted.rpartition('.')[2]} of {keys.file} names is taken to be the model's block.")
        return "block"
    policies = "a set of classes, transformer_auto_wrap_policy, ModuleWrapPolicy or size_based_auto_wrap_policy"
    raise keys.wrong(dotted, named, policies)
