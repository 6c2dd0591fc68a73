"""The weights of the seed for a model on the meta device, with memory for one whole parameter (FSDP1: one unit).

What a parameter is filled with depends on the seed, its name and its whole shape only (`labs.model.initial_`), so it
can be made whole on any rank at any time, and every rank keeps what it needs of it: no communication, and the same
numbers as in a model that was built whole. DTensor's own random init would not do: on a CPU mesh it draws the same
shard on every rank, and on no device the numbers of one process. Its price: every rank draws all numbers on its CPU (8B
of them take minutes) before the first step of a run that does not go on from a checkpoint or from ``init_from``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from labs.model import initial_
from labs.wrapping.base import original_name
from labs.wrapping.wrap_policy import ties


def whole_of(plain: nn.Module, name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """A parameter's first values, all of them, on the CPU."""
    whole = torch.empty(shape)
    initial_(plain, name, whole, seed)
    return whole


@torch.no_grad()
def materialise_shards(model: nn.Module, plain: nn.Module, seed: int, device: torch.device, host: bool) -> None:
    """Memory and values for a sharded model on the meta device: of each parameter this rank's rows.

    Args:
        plain: the model before wrapping, on the meta device.
        host: the shards belong into host memory.
    """
    model.to_empty(device="cpu" if host else device)  # of DTensors it swaps the contents, so that ties hold
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor)
        _keep_shard(param, whole_of(plain, original_name(name), param.shape, seed))


def fill_module(model: nn.Module, plain: nn.Module, seed: int, device: torch.device) -> Callable[[nn.Module], None]:
    """A function that gives one module of ``model`` its own parameters and memory for its buffers, in place.

    It is FSDP1's ``param_init_fn``, which is called with each module of a unit before the unit is flattened.
    """
    names = {param: original_name(name) for name, param in model.named_parameters()}
    shared = {model.get_parameter(first) for first, *_ in ties(model)}
    done: dict[nn.Parameter, nn.Parameter] = {}  # tied ones only: others are to be freed when they are flattened

    def fill(module: nn.Module) -> None:
        for key, param in list(module.named_parameters(recurse=False)):
            new = done.get(param)
            if new is None:
                whole = whole_of(plain, names[param], param.shape, seed)
                new = nn.Parameter(whole.to(device), requires_grad=param.requires_grad)
            if param in shared:
                done[param] = new
            module.register_parameter(key, new)
        for key, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[key] = torch.empty_like(buffer, device=device)

    return fill


def _keep_shard(param: DTensor, whole: torch.Tensor) -> None:
    mine = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)  # no communication
    param.to_local().copy_(mine.to_local())
