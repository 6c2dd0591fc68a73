"""What an api cannot do, found in the settings alone: before any process group exists, so that one rank can say it."""

from __future__ import annotations

import torch

from fsdp_sim.spec import text_of
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.model import empty
from labs.wrapping.mesh import is_hybrid, shard_size
from labs.wrapping.wrap_policy import find_units

_FULLY_SHARD = ("fsdp2", "hsdp", "mini")
_SHARDED = (*_FULLY_SHARD, "fsdp1")

SETTINGS_OF = {  # what the plan leaves open; a value other than the default is refused elsewhere
    "wrap": _SHARDED,
    "reduce_dtype": _SHARDED,
    "shard_size": ("hsdp", "fsdp1"),
    "use_orig_params": ("fsdp1",),
    "sync_module_states": ("fsdp1",),
}

INSTEAD = {  # what another api calls it
    ("shard_size", "fsdp2"): "use api=hsdp",
    ("shard_size", "mini"): "use api=hsdp",
    ("sync_module_states", "fsdp2"): "every rank draws the same weights from the seed",
}


def check(config: TrainConfig, place: RankPlace, device: torch.device) -> None:
    """Refuse combinations that make no sense for ``config.api``, or that would train wrongly in silence.

    `Plan` has refused what makes no sense for its api when the configuration was made.

    Raises:
        ValueError: names the field, its value, and what to do instead.
    """
    api = config.api
    given, defaults = config.by_key(), TrainConfig().by_key()
    for field, apis in SETTINGS_OF.items():
        if api not in apis and given[field] != defaults[field]:
            instead = INSTEAD.get((field, api), f"leave it {text_of(defaults[field])}")
            raise _error(config, field, f"a setting of {' and '.join(apis)}, and api is {api}; {instead}")
    if api == "single" and place.world_size > 1:
        raise ValueError(f"api=single is one process, and there are {place.world_size} ranks; use api=ddp or fsdp2")
    shards = shard_size(config, place)
    if api == "fsdp1":
        _check_fsdp1(config, device)
        _check_fsdp1_gradients(config, place, shards)
    elif api in _FULLY_SHARD:
        _check_fully_sharded(config, shards)
    if api in _SHARDED and config.plan.wrap not in ("block", "root"):
        find_units(empty(config.model_config), config.plan.wrap)  # raises for a class that the model does not have


def _check_fully_sharded(config: TrainConfig, shards: int) -> None:
    keep = config.plan.reshard_after_forward
    if keep is not None and not isinstance(keep, bool) and (keep < 1 or shards % keep):
        sizes = ", ".join(str(n) for n in range(1, shards + 1) if shards % n == 0)
        raise _error(
            config,
            "reshard_after_forward",
            f"not a divisor of the {shards} ranks that share the parameters; use {sizes}",
        )


def _check_fsdp1(config: TrainConfig, device: torch.device) -> None:
    if not config.use_orig_params:
        if config.weight_decay > 0:
            raise _error(
                config, "use_orig_params", "one flat parameter per unit, in which what decays and what does not cannot "
                f"be told apart, and weight_decay is {config.weight_decay}; use weight_decay=0 or use_orig_params=true"
            )  # fmt: skip
        if config.plan.compile:
            raise _error(config, "use_orig_params", "what torch.compile cannot see through; use use_orig_params=true")
    if config.sync_module_states and device.type == "cpu":
        raise _error(config, "sync_module_states", "for GPUs only; every rank draws the same weights without it")
    if config.plan.cpu_offload and device.type == "cpu":
        raise _error(config, "cpu_offload", "for GPUs only with fsdp1, which pins host memory; use api=fsdp2")


def _check_fsdp1_gradients(config: TrainConfig, place: RankPlace, shards: int) -> None:
    """What FSDP1 would get wrong, in silence or far from here."""
    if is_hybrid(config) and shards == 1 < place.world_size:
        raise ValueError(
            f"sharding_strategy={config.plan.sharding_strategy} with one rank per copy: FSDP1 makes that "
            "NO_SHARD within each copy and never averages gradients between them; use api=ddp, or a larger shard_size"
        )
    accumulates = config.micro_batch is not None and config.micro_batch * place.world_size < config.global_batch
    if config.plan.cpu_offload and accumulates and config.plan.requires_gradient_sync != "last":
        raise ValueError(
            f"cpu_offload=true with fsdp1 and several micro-batches (micro_batch={config.micro_batch}): FSDP1 keeps "
            "only the newest reduced gradient in host memory; use requires_gradient_sync=last or api=fsdp2"
        )
    if (
        accumulates
        and config.plan.requires_gradient_sync == "last"
        and config.plan.sharding_strategy == "NO_SHARD"
        and config.plan.param_dtype != "fp32"
        and config.use_orig_params
        and place.world_size > 1
    ):
        raise _error(
            config, "requires_gradient_sync", f"what NO_SHARD cannot do with param_dtype={config.plan.param_dtype}: "
            "FSDP1 would set fp32 parameters' gradients in that dtype; use requires_gradient_sync=true or api=ddp"
        )  # fmt: skip


def _error(config: TrainConfig, field: str, what: str) -> ValueError:
    return ValueError(f"{field}={text_of(config.by_key()[field])} is {what}")
