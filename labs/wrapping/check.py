"""What an api cannot do, found in the settings alone: before any process group exists, so that one rank can say it."""

from __future__ import annotations

import dataclasses

import torch

from labs.cluster.process_group import Place
from labs.config import TrainConfig
from labs.model import empty
from labs.wrapping.mesh import is_hybrid, shard_size
from labs.wrapping.wrap_policy import find_units

_FULLY_SHARD = ("fsdp2", "hsdp", "mini")
_SHARDED = (*_FULLY_SHARD, "fsdp1")

SETTINGS_OF = {  # fields that only some apis have; a value other than the default is refused elsewhere
    "wrap": _SHARDED,
    "reshard_after_forward": _FULLY_SHARD,
    "shard_size": ("hsdp", "fsdp1"),
    "forward_prefetch": _SHARDED,
    "backward_prefetch": _SHARDED,
    "sharding_strategy": ("fsdp1",),
    "limit_all_gathers": ("fsdp1",),
    "use_orig_params": ("fsdp1",),
    "sync_module_states": ("fsdp1",),
    "reduce_dtype": _SHARDED,
    "cpu_offload": _SHARDED,
}

INSTEAD = {  # what another api calls it
    ("reshard_after_forward", "fsdp1"): "fsdp1 has sharding_strategy=FULL_SHARD and SHARD_GRAD_OP",
    ("sharding_strategy", "fsdp2"): "fsdp2 has reshard_after_forward, and api=hsdp has shard_size",
    ("sharding_strategy", "hsdp"): "hsdp has reshard_after_forward and shard_size",
    ("sharding_strategy", "mini"): "mini has reshard_after_forward",
    ("shard_size", "fsdp2"): "use api=hsdp",
    ("shard_size", "mini"): "use api=hsdp",
    ("sync_module_states", "fsdp2"): "every rank draws the same weights from the seed",
    ("limit_all_gathers", "fsdp2"): "fsdp2 bounds its memory by events, without blocking the CPU",
}

FSDP1_BACKWARD = (None, "BACKWARD_PRE", "BACKWARD_POST", "off")


def check(config: TrainConfig, place: Place, device: torch.device) -> None:
    """Refuse combinations that make no sense for ``config.api``, or that would train wrongly in silence.

    Raises:
        ValueError: names the field, its value, and what to do instead.
    """
    api = config.api
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in SETTINGS_OF and api not in SETTINGS_OF[field.name] and value != field.default:
            apis = " and ".join(SETTINGS_OF[field.name])
            instead = INSTEAD.get((field.name, api), f"leave it {_written(field.default)}")
            raise _error(config, field.name, f"a setting of {apis}, and api is {api}; {instead}")
    if api == "single" and place.world_size > 1:
        raise ValueError(f"api=single is one process, and there are {place.world_size} ranks; use api=ddp or fsdp2")
    shards = shard_size(config, place)
    if api == "fsdp1":
        _check_fsdp1(config, device)
        _check_fsdp1_gradients(config, place, shards)
    elif api in _FULLY_SHARD:
        _check_fully_sharded(config, shards)
    if api in _SHARDED and config.wrap not in ("block", "root"):
        find_units(empty(config.model_config), config.wrap)  # raises for a class that the model does not have


def _check_fully_sharded(config: TrainConfig, shards: int) -> None:
    for name in ("forward_prefetch", "backward_prefetch"):
        depth = getattr(config, name)
        if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
            raise _error(config, name, f"not what api={config.api} takes: none (implicit), or a depth of at least 1")
    keep = config.reshard_after_forward
    if keep is not None and not isinstance(keep, bool) and (keep < 1 or shards % keep):
        sizes = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
        raise _error(
            config,
            "reshard_after_forward",
            f"not a divisor of the {shards} ranks that share the parameters; use {sizes}",
        )


def _check_fsdp1(config: TrainConfig, device: torch.device) -> None:
    if config.forward_prefetch not in (None, True, False) or type(config.forward_prefetch) is int:
        raise _error(config, "forward_prefetch", "a depth, and fsdp1 has only true or false")
    if config.backward_prefetch not in FSDP1_BACKWARD:
        values = ", ".join(value for value in FSDP1_BACKWARD if value)
        raise _error(config, "backward_prefetch", f"not what fsdp1 takes: {values}, or none for torch's default")
    if config.shard_size is not None and not is_hybrid(config):
        raise _error(
            config, "shard_size", f"for hybrid sharding, and sharding_strategy is {config.sharding_strategy}; "
            "use sharding_strategy=HYBRID_SHARD"
        )  # fmt: skip
    if not config.use_orig_params:
        if config.weight_decay > 0:
            raise _error(
                config, "use_orig_params", "one flat parameter per unit, in which what decays and what does not cannot "
                f"be told apart, and weight_decay is {config.weight_decay}; use weight_decay=0 or use_orig_params=true"
            )  # fmt: skip
        if config.compile:
            raise _error(config, "use_orig_params", "what torch.compile cannot see through; use use_orig_params=true")
    if config.sync_module_states and device.type == "cpu":
        raise _error(config, "sync_module_states", "for GPUs only; every rank draws the same weights without it")
    if config.cpu_offload and device.type == "cpu":
        raise _error(config, "cpu_offload", "for GPUs only with fsdp1, which pins host memory; use api=fsdp2")


def _check_fsdp1_gradients(config: TrainConfig, place: Place, shards: int) -> None:
    """What FSDP1 would get wrong, in silence or far from here."""
    if is_hybrid(config) and shards == 1 < place.world_size:
        raise ValueError(
            f"sharding_strategy={config.sharding_strategy} with one rank per copy of the parameters: FSDP1 makes that "
            "NO_SHARD within each copy and never averages gradients between them; use api=ddp, or a larger shard_size"
        )
    accumulates = config.micro_batch is not None and config.micro_batch * place.world_size < config.global_batch
    if config.cpu_offload and accumulates and config.requires_gradient_sync != "last":
        raise ValueError(
            f"cpu_offload=true with fsdp1 and several micro-batches (micro_batch={config.micro_batch}): FSDP1 keeps "
            "only the newest reduced gradient in host memory; use requires_gradient_sync=last or api=fsdp2"
        )
    if (
        accumulates
        and config.requires_gradient_sync == "last"
        and config.sharding_strategy == "NO_SHARD"
        and config.param_dtype != "fp32"
        and config.use_orig_params
        and place.world_size > 1
    ):
        raise _error(
            config, "requires_gradient_sync", f"what FSDP1's NO_SHARD cannot do with param_dtype={config.param_dtype}: "
            "it would set fp32 parameters' gradients in that dtype; use requires_gradient_sync=true or api=ddp"
        )  # fmt: skip


def _written(value: object) -> str:
    """As on the command line."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _error(config: TrainConfig, field: str, what: str) -> ValueError:
    return ValueError(f"{field}={_written(getattr(config, field))} is {what}")
