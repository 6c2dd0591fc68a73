"""One word, `TrainConfig.api`, chooses how the model is spread over the ranks; nothing else in the trainer knows it.

check                   what an api cannot do, said before any process group exists
wrap_policy             which modules become units, the same list for every api
checkpoint_and_compile  activation checkpointing and torch.compile of each block: before the parameters are cut
precision               dtypes, and the scaler that fp16 needs
meta_init               the numbers of the seed, for models built on the meta device
mesh                    which ranks share one copy of the parameters
base                    `Wrapped`, what the trainer gets
replicated              single, ddp
fully_sharded           fsdp2, hsdp, mini: fully_shard
fsdp1                   fsdp1: FullyShardedDataParallel
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.device_mesh import DeviceMesh

from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.model import ModelConfig, build, empty
from labs.wrapping.base import Job, Wrapped
from labs.wrapping.check import check
from labs.wrapping.checkpoint_and_compile import checkpoint_blocks, compile_blocks
from labs.wrapping.fsdp1 import wrap_fsdp1
from labs.wrapping.fully_sharded import wrap_fully_sharded
from labs.wrapping.replicated import wrap_ddp, wrap_single
from labs.wrapping.wrap_policy import find_units

__all__ = ["Wrapped", "check", "wrap"]

WRAPPERS: dict[str, Callable[[Job], Wrapped]] = {
    "single": wrap_single,
    "ddp": wrap_ddp,
    "fsdp2": wrap_fully_sharded,
    "hsdp": wrap_fully_sharded,
    "mini": wrap_fully_sharded,
    "fsdp1": wrap_fsdp1,
}


def wrap(
    config: TrainConfig,
    model_config: ModelConfig,
    place: RankPlace,
    device: torch.device,
    mesh: DeviceMesh | None = None,
) -> Wrapped:
    """The model with the weights of ``config.seed``, spread over all ranks as ``config.api`` says.

    A collective call, with the process group up (single needs none). Whatever the api, the number of ranks and
    ``meta_init``, the weights are bit for bit those of `labs.model.build`.

    Args:
        device: what computes; with ``cpu_offload`` the parameters stay in host memory.
        mesh: of which ranks; by default all, see `labs.wrapping.mesh`.

    Raises:
        ValueError: as `check`, or a wrap policy that finds no module in this model.
    """
    check(config, place, device)
    plain = empty(model_config)
    model = empty(model_config) if config.meta_init else build(model_config, config.seed)
    checkpoint_blocks(model, config.plan.activation_checkpointing)
    if config.plan.compile:
        compile_blocks(model, config.compile_backend)
    units = find_units(plain, config.plan.wrap)
    wrapped = WRAPPERS[config.api](Job(config, model, plain, units, place, device, mesh))
    # Tables that are in no checkpoint (RoPE's): after meta_init they hold whatever was in memory; else on a GPU each
    # block would have a copy.
    model.init_buffers(device)
    return wrapped
