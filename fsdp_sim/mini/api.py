"""What you call: `fully_shard`, and the methods that a sharded module gains.

`fully_shard` changes a module in place: it shards the parameters, hooks the module, and gives it a class that is both
its own and `FSDPModule`. Nothing is wrapped, so parameter names, and with them checkpoints, stay what they were.

    for layer in model.layers:
        fully_shard(layer)      # each layer is one unit: gathered, computed, freed
    fully_shard(model)          # the root takes the parameters that are left (embedding, head)
    optimizer = torch.optim.AdamW(model.parameters())   # after sharding: it holds shards
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.mini.state import FSDPState, state_of


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> Any:
    """Shard the parameters of a module over the ranks of a mesh, and gather them around its forward and backward.

    The module's group takes all its parameters but those of modules below that are sharded already (so shard bottom
    up) and ``ignored_params``. Source: `torch.distributed.fsdp.fully_shard`.

    Args:
        module: a module, or a list of modules that make one group.
        mesh: 1-D; all ranks by default.
        reshard_after_forward: True frees the unsharded parameters after forward and gathers them again in backward;
            False keeps them. None means True, but False for the root.
        mp_policy, offload_policy: only the defaults so far.
        ignored_params: parameters that are neither sharded nor reduced.

    Returns:
        the argument, changed in place: its class is now ``FSDP<Name>``, a subclass of its own and of `FSDPModule`.

    Raises:
        ValueError: a container without a forward, a module sharded already, a scalar parameter, a mesh of 3 or more
            dimensions, a ``reshard_after_forward`` that is neither bool nor int.
        NotImplementedError: what torch can do and this version cannot yet; the message says what it can.
    """
    modules = _roots([module] if isinstance(module, nn.Module) else list(module))
    _validate_modules(modules)
    _validate_supported(reshard_after_forward, mp_policy, offload_policy)
    mesh = _validate_mesh(mesh) if mesh is not None else _init_default_mesh()
    managed = _managed_modules(modules)
    params = _managed_params(managed, ignored_params or set())
    _move_to_device(params, managed, mesh)

    reshard = True if reshard_after_forward is None else bool(reshard_after_forward)
    group = FSDPParamGroup(params, modules, mesh, reshard) if params else None
    state = FSDPState(modules, group, auto_reshard_after_forward=reshard_after_forward is None)
    for m in modules:
        m._fsdp_state = state  # type: ignore[assignment]
        m.__class__ = _fsdp_class(type(m))
    return module


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns; torch's class of the same name."""

    def __init__(self, group: FSDPParamGroup | None) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for the all-gather and register the unsharded parameters. The module's forward does it too."""
        if self._group is not None:
            self._group.wait_for_unshard()
            self._group = None


class FSDPModule:
    """The methods a module gains from `fully_shard`. Setters work on the next forward or backward."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A new instance, as slicing an `nn.Sequential` makes, is of the original class."""
        original: Any = cls.__mro__[2]
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters now (not those of sharded modules below).

        Returns:
            with ``async_op`` a handle to wait on; else None, the parameters are there.
        """
        group = self._get_fsdp_state().param_group
        if group is not None:
            group.lazy_init()
            group.unshard()
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters (not those of sharded modules below)."""
        group = self._get_fsdp_state().param_group
        if group is not None:
            group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False accumulates whole gradients on each rank, without communication."""
        for group in self._groups(recurse):
            group.reduce_grads = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``; for the root this also replaces the rule that None means False.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be True or False here, not {reshard_after_forward!r}")
        for state in self._states(recurse):
            state.auto_reshard_after_forward = False
            if state.param_group is not None:
                state.param_group.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the unsharded parameters. False spares the next micro-batch its all-gathers."""
        for group in self._groups(recurse):
            group.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """In forward, issue the all-gathers of these modules as soon as this module's parameters are there.

        On CPU this is what makes forward overlap: without it an all-gather is issued by the thread that has to wait
        for it next. Two modules ahead hide more and need one more gathered buffer.
        """
        self._get_fsdp_state().states_to_forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """The same in backward, instead of the default: the unit whose forward ended before this one's."""
        self._get_fsdp_state().states_to_backward_prefetch = _states_of(modules)

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(cast(nn.Module, self))
        if state is None:
            raise RuntimeError(f"{type(self).__name__} has no FSDP state; apply fully_shard to it first")
        return state

    def _states(self, recurse: bool) -> list[FSDPState]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        return [state for m in modules if (state := state_of(m)) is not None]

    def _groups(self, recurse: bool) -> list[FSDPParamGroup]:
        return [s.param_group for s in self._states(recurse) if s.param_group is not None]


def _fsdp_class(cls: type) -> type:
    if cls not in _fsdp_classes:
        _fsdp_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy})
    return _fsdp_classes[cls]


_fsdp_classes: dict[type, type] = {}


def _no_deepcopy(self: nn.Module, memo: object) -> NoReturn:
    raise RuntimeError(
        f"{type(self).__name__} cannot be deep-copied, its hooks would act on the original; copy the module before "
        "fully_shard, or use its state dict"
    )


def _states_of(modules: list[FSDPModule]) -> list[FSDPState]:
    for m in modules:
        if not isinstance(m, FSDPModule):
            raise ValueError(f"only modules given to fully_shard can be prefetched, but got {type(m).__name__}")
    return [m._get_fsdp_state() for m in modules]


# Which modules, which parameters


def _roots(modules: list[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules that are not inside another one of the list, each once."""
    inside = {id(sub) for m in modules for sub in m.modules() if sub is not m}
    return tuple({id(m): m for m in modules if id(m) not in inside}.values())


def _managed_modules(modules: tuple[nn.Module, ...]) -> list[nn.Module]:
    """The modules and all below, without those that are sharded already."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in found and state_of(module) is None:
            for child in module.children():
                visit(child)
            found[module] = None

    for module in modules:
        visit(module)
    return list(found)


def _managed_params(managed: list[nn.Module], ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    found: dict[nn.Parameter, None] = {}
    for module in managed:
        for name, param in module.named_parameters(recurse=False):
            if param in ignored:
                continue
            if param.ndim == 0:
                raise ValueError(
                    f"fully_shard cannot split the scalar parameter {type(module).__name__}.{name}; make it a "
                    "tensor of shape (1,)"
                )
            found[param] = None
    return list(found)


def _move_to_device(params: list[nn.Parameter], managed: list[nn.Module], mesh: DeviceMesh) -> None:
    buffers = [b for m in managed for b in m.buffers(recurse=False)]
    for tensor in (*params, *buffers):
        if tensor.device.type not in (mesh.device_type, "meta"):
            tensor.data = tensor.to(mesh.device_type)


# What this version takes


def _validate_modules(modules: tuple[nn.Module, ...]) -> None:
    for module in modules:
        if state_of(module) is not None:
            raise ValueError(f"fully_shard was already applied to this {type(module).__name__}; apply it once")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"{type(module).__name__} has no forward, so its parameters would never be gathered; shard the modules "
                "in it"
            )


def _validate_supported(
    reshard_after_forward: object, mp_policy: MixedPrecisionPolicy | None, offload_policy: OffloadPolicy | None
) -> None:
    if not isinstance(reshard_after_forward, (bool, int, type(None))):
        raise ValueError(f"reshard_after_forward must be True, False or None, not {reshard_after_forward!r}")
    if not isinstance(reshard_after_forward, (bool, type(None))):
        raise NotImplementedError(
            f"reshard_after_forward={reshard_after_forward!r} (a smaller mesh) is not built yet; use a bool or None"
        )
    if mp_policy is not None and mp_policy != MixedPrecisionPolicy():
        raise NotImplementedError(f"mp_policy={mp_policy} is not built yet; use MixedPrecisionPolicy(), the default")
    if offload_policy is not None and type(offload_policy) is not OffloadPolicy:
        raise NotImplementedError(f"offload_policy={offload_policy} is not built yet; use OffloadPolicy(), the default")


def _validate_mesh(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim > 2:
        raise ValueError(f"fully_shard takes a mesh of 1 dimension, but got {mesh.ndim} dimensions: {mesh}")
    if mesh.ndim == 2:
        raise NotImplementedError(f"a 2-D mesh (hybrid sharding) is not built yet; use a 1-D mesh, not {mesh}")
    return mesh


def _init_default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group first, or pass mesh="
        )
    accelerator = torch.accelerator.current_accelerator()
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
