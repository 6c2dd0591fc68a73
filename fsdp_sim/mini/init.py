"""Weights for a model built on the meta device: the numbers one process would draw, with memory for one unit.

A model too large for one machine is built on the meta device (shapes, no memory), sharded, and then initialized. The
usual recipe, ``model.to_empty(device=...)`` and a random init of the shards, goes wrong: on a CPU mesh DTensor draws
the same shard on every rank, and on no device are the numbers those of a run on one process. Here every rank draws
everything: it builds one unit whole, initializes it from the one random stream all ranks share, keeps its rows and
frees the rest before the next. That costs time on every rank, no communication, and at most one unit of memory.

[Note: in which order]  The random stream must be read in the order of ``model.apply(init_fn)``: children first. A unit
without units inside is one stretch of that order and is built whole. A unit with units inside (the root: embedding,
then the layers, then the head) is several stretches, and each is built when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from fsdp_sim.mini.param import FSDPParam, local_tensor
from fsdp_sim.mini.state import FSDPState, state_of


def init_weights(model: nn.Module, init_fn: Callable[[nn.Module], object] | None = None, seed: int = 0) -> None:
    """Give a sharded model the weights that ``torch.manual_seed(seed); model.apply(init_fn)`` gives on one process.

    Call it on all ranks after `fully_shard` and before the optimizer is made. The random numbers are drawn on the
    CPU; the caller's random state stays as it was.

    Args:
        model: whose parameters (and buffers) are on the meta device; others are initialized again.
        init_fn: initializes the parameters and buffers of the module it is given, and of modules below in the same
            unit. By default ``module.reset_parameters()`` where there is one.
        seed: the same on all ranks.

    Raises:
        RuntimeError: a floating-point parameter or buffer that ``init_fn`` left as it was, or parameters of another
            unit that it changed (on them it acts on shards, and differently on each rank).
    """
    init_fn = init_fn or _reset_parameters
    states = {state for module in model.modules() if (state := state_of(module)) is not None}
    fsdp_params = {id(p.sharded_param): p for p in _sharded(states)}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for modules in _stretches(model):
            _init_stretch(modules, init_fn, fsdp_params)


def _sharded(states: set[FSDPState]) -> list[FSDPParam]:
    groups = [group for state in states for group in state._fsdp_param_groups]
    for group in groups:
        group._to_sharded()
    return [p for group in groups for p in group.fsdp_params]


def _stretches(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The modules in the order of ``module.apply``, cut where a unit begins or ends."""
    if any(state_of(m) is not None for m in module.modules() if m is not module):
        for child in module.children():
            yield from _stretches(child)
        yield [module]
    else:
        in_order: list[nn.Module] = []
        module.apply(in_order.append)
        yield in_order


def _init_stretch(
    modules: list[nn.Module], init_fn: Callable[[nn.Module], object], fsdp_params: dict[int, FSDPParam]
) -> None:
    """Build the modules' own parameters whole, initialize, keep this rank's rows. ``fsdp_params`` follows changes."""
    of_whole: dict[int, tuple[nn.Parameter, FSDPParam | None]] = {}  # by the parameter that was registered
    named: dict[str, torch.Tensor] = {}
    versions = {id(p): _versions(p) for p in fsdp_params.values()}
    for module in modules:
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            fsdp_param = fsdp_params.get(id(param))
            if id(param) not in of_whole:
                of_whole[id(param)] = (nn.Parameter(_whole(param, fsdp_param), param.requires_grad), fsdp_param)
                named[f"{type(module).__name__}.{name}"] = of_whole[id(param)][0]
            module._parameters[name] = of_whole[id(param)][0]
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module._buffers[name] = named[f"{type(module).__name__}.{name}"] = _untouched(buffer)
    for module in modules:
        init_fn(module)
    if left := [name for name, t in named.items() if t.is_floating_point() and t.numel() and t.isnan().all()]:
        raise RuntimeError(f"init_fn left these as they were, without values: {left}; initialize them too")
    for p in fsdp_params.values():
        if _versions(p) != versions[id(p)]:
            raise RuntimeError(
                f"init_fn changed {p._param_fqn} when it was given a {type(modules[-1]).__name__}: that parameter is "
                "in another unit and sharded. Let init_fn change only the module it is given"
            )
    for key, (whole, fsdp_param) in of_whole.items():
        if fsdp_param is not None:
            del fsdp_params[key]
            fsdp_param.shard(whole)
            fsdp_params[id(fsdp_param.sharded_param)] = fsdp_param


def _whole(param: nn.Parameter, fsdp_param: FSDPParam | None) -> torch.Tensor:
    """Memory for all of a parameter, on the CPU; with its values if it has some (a tied one was initialized before)."""
    if param.is_meta:
        return _untouched(param)
    return (param if fsdp_param is None else param.full_tensor()).to("cpu", copy=True)  # type: ignore[attr-defined]


def _untouched(tensor: torch.Tensor) -> torch.Tensor:
    """NaN, by which a parameter that nobody initializes is recognized."""
    return torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0, dtype=tensor.dtype)


def _versions(fsdp_param: FSDPParam) -> tuple[int, int]:
    """Autograd's counts of writes to the shard, as a DTensor and as the tensor in it."""
    return fsdp_param.sharded_param._version, local_tensor(fsdp_param.sharded_param)._version


def _reset_parameters(module: nn.Module) -> None:
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
