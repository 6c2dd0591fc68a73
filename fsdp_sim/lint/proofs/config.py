"""Proofs of the traps in configurations: with Accelerate and transformers themselves, with torch, or by simulation."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from fsdp_sim.lint.proofs._toy import Shown, Toy, fsdp1, fully_shard, of_all, raised
from fsdp_sim.simulation import Fit, Simulation, simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.words import human_bytes, human_ms


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Variables as ``accelerate launch`` sets them."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _plugin(**values: str) -> Any:
    utils: Any = importlib.import_module("accelerate.utils")

    with environment(FSDP_VERSION="1", ACCELERATE_USE_FSDP="true", **values):
        return utils.FullyShardedDataParallelPlugin()


def reshard_ignored() -> Shown:
    trap = _plugin(
        FSDP_RESHARD_AFTER_FORWARD="SHARD_GRAD_OP", FSDP_SHARDING_STRATEGY="FULL_SHARD"
    ).sharding_strategy.name
    fix = _plugin(FSDP_SHARDING_STRATEGY="SHARD_GRAD_OP").sharding_strategy.name
    return Shown(trap == "FULL_SHARD" and fix == "SHARD_GRAD_OP", trap, fix)


def other_models_block() -> Shown:
    def wrapped(name: str) -> str:
        plugin = _plugin(FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP", FSDP_TRANSFORMER_CLS_TO_WRAP=name)
        return raised(lambda: plugin.set_auto_wrap_policy(Toy()))

    trap, fix = wrapped("GPT2Block"), wrapped("Block")
    return Shown("Could not find" in trap and not fix, trap, fix or "is found")


def size_wraps_nothing() -> Shown:
    def policy(least: str) -> Any:
        plugin = _plugin(FSDP_AUTO_WRAP_POLICY="SIZE_BASED_WRAP", FSDP_MIN_NUM_PARAMS=least)
        plugin.set_auto_wrap_policy(Toy())
        return plugin.auto_wrap_policy

    trap, fix = policy("0"), policy("100")
    # Accelerate leaves its own function unbound, or None: torch is given no policy with a number
    return Shown("min_num_params" not in str(trap) and "100" in str(fix), str(trap), str(fix))


def _arguments(**values: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")

    with environment():
        return transformers.TrainingArguments(output_dir="/tmp", use_cpu=True, report_to=[], **values)


def fsdp_config_without_fsdp() -> Shown:
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:  # transformers takes seconds to import
        config = {"transformer_layer_cls_to_wrap": ["Block"]}
        found = [
            _arguments(fsdp_config=dict(config)),
            _arguments(fsdp_config=dict(config), fsdp="full_shard auto_wrap"),
        ]
        found = [bool(getattr(one, "fsdp_plugin_args", None)) for one in found]
    trap, fix = of_all(found)[0]
    return Shown(not trap and fix, f"Accelerate is told to shard: {trap}", f"{fix}")


def _step(model: str = "llama3-8b", gpu: str = "A100", gpus: int = 8, **plan: Any) -> Simulation:
    return simulate(model, Cluster(gpu, gpus=gpus), Plan(param_dtype="bf16", reduce_dtype="fp32", **plan))


def backward_prefetch_off() -> Shown:
    trap = _step(gpus=64, api="fsdp1", backward_prefetch="none").step_time_s
    fix = _step(gpus=64, api="fsdp1", backward_prefetch="BACKWARD_PRE").step_time_s
    return Shown(trap > 1.01 * fix, human_ms(trap), human_ms(fix))


def local_state_dict() -> Shown:
    def names(kind: StateDictType) -> set[str]:
        model = fsdp1(Toy())
        with FullyShardedDataParallel.state_dict_type(model, kind):
            return set(model.state_dict())

    trap, fix = names(StateDictType.LOCAL_STATE_DICT), names(StateDictType.SHARDED_STATE_DICT)
    own = set(Toy().state_dict())
    return Shown(
        not trap & own and fix == own, f"flat shards: {sorted(trap)[:2]}", f"the model's names: {sorted(fix)[:2]}"
    )


def hybrid_on_one_node() -> Shown:
    def local(shape: tuple[int, ...]) -> int:
        names = ("replicate", "shard")[-len(shape) :]
        model = fully_shard(Toy(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        return sum(p.to_local().numel() for p in model.parameters())

    trap, fix = local((1, 2)), local((2,))
    return Shown(trap == fix, f"{trap} elements on this rank in one replica", f"{fix} with full sharding")


def one_rank() -> Shown:
    trap, fix = _step("gpt2-124m", gpus=1).peak_memory_bytes, _step("gpt2-124m", gpus=8).peak_memory_bytes
    alone = simulate("gpt2-124m", Cluster("A100", gpus=1), Plan(api="ddp", param_dtype="bf16")).peak_memory_bytes
    holds = trap >= 0.9 * alone and fix < trap
    return Shown(holds, f"{human_bytes(trap)}, DDP {human_bytes(alone)}", human_bytes(fix))


def does_not_fit() -> Shown:
    trap, fix = _step("llama3-70b", gpus=8), _step("llama3-70b", gpus=256, activation_checkpointing="full")
    states = 16 * 70e9 / 8
    holds = trap.fit == Fit.DOES_NOT_FIT and fix.fit == Fit.FITS and states > 80e9
    return Shown(holds, f"{human_bytes(states)} of states alone for 80 GB", f"{human_bytes(fix.peak_memory_bytes)}")


def offload_though_it_fits() -> Shown:
    trap, fix = _step(cpu_offload=True).step_time_s, _step().step_time_s
    return Shown(trap > 1.1 * fix, human_ms(trap), human_ms(fix))
