"""What you call: `fully_shard`, and the methods that a sharded module gains.

`fully_shard` changes a module in place: it shards the parameters, hooks the module, and gives it a class that is both
its own and `FSDPModule`. Nothing is wrapped, so parameter names, and with them checkpoints, stay what they were.

    for layer in model.layers:
        fully_shard(layer)      # each layer is one unit: gathered, computed, freed
    fully_shard(model)          # the root takes the parameters that are left (embedding, head)
    optimizer = torch.optim.AdamW(model.parameters())   # after sharding: it holds shards
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem
from torch.distributed.device_mesh import DeviceMesh, _get_device_handle
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.mini.hsdp import FSDPMeshInfo, get_mesh, post_forward_mesh_info, set_separate_reduce_scatter_group
from fsdp_sim.mini.modules import managed_modules, managed_params, move_to_device, root_modules
from fsdp_sim.mini.state import FSDPState, state_of


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard the parameters of a module over the ranks of a mesh, and gather them around its forward and backward.

    The module's group takes all its parameters but those of modules below that are sharded already (so shard bottom
    up) and ``ignored_params``. Source: `torch.distributed.fsdp.fully_shard`. ``fully_shard.state(module)`` is the
    state of a module.

    Args:
        module: a module, or a list of modules that make one group.
        mesh: 1-D: shard over it. 2-D with names: replicate over the first dimension, shard over the second (hybrid
            sharding). All ranks by default.
        reshard_after_forward: True frees the unsharded parameters after forward and gathers them again in backward;
            False keeps them. None means True, but False for the root. An int n, which divides the number of shards,
            keeps 1/n and gathers from n ranks.
        shard_placement_fn: the placement of a parameter; only dim 0 here: it may return None or ``Shard(0)``.
        mp_policy: dtypes of gather, compute, reduction and output.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and the optimizer in host memory.
        ignored_params: parameters that are neither sharded nor moved nor reduced.
        dp_mesh_dims: for tensor parallelism; not here.

    Returns:
        the argument, changed in place: its class is now ``FSDP<Name>``, a subclass of its own and of `FSDPModule`.

    Raises:
        ValueError: a container without a forward, a scalar parameter, a mesh of 3 or more dimensions, a
            ``reshard_after_forward`` that does not fit the mesh.
        AssertionError: a module sharded already, a 2-D mesh without names.
        IndexError: no modules. RuntimeError: a lazy module that has not seen an input. TypeError: a DTensor parameter.
        NotImplementedError: a parameter that is not contiguous or tensor parallel, a placement on another dimension.
    """
    modules = root_modules([module] if isinstance(module, nn.Module) else list(module))
    if dp_mesh_dims is not None:
        raise NotImplementedError("dp_mesh_dims is for tensor-parallel meshes, which this FSDP leaves out; pass mesh")
    mesh = get_mesh(mesh)
    mesh_info = FSDPMeshInfo(mesh)
    device = _device_of(mesh)
    mp_policy, offload_policy = mp_policy or MixedPrecisionPolicy(), offload_policy or OffloadPolicy()
    auto = reshard_after_forward is None
    post_forward = post_forward_mesh_info(True if reshard_after_forward is None else reshard_after_forward, mesh_info)
    managed = managed_modules(modules, ignored_params)
    params = managed_params(managed, ignored_params or set(), shard_placement_fn)
    move_to_device(params, managed, device)

    group = None
    if params:
        group = FSDPParamGroup(params, modules, mesh_info, post_forward, device, mp_policy, offload_policy)
    state = FSDPState(modules, group, device, mp_policy, auto_reshard_after_forward=auto)
    for m in modules:
        m._fsdp_state = state  # type: ignore[assignment]
        m.__dict__.setdefault(REGISTRY_KEY, {})["fully_shard"] = RegistryItem()  # torch's `replicate` passes it by
        m.__class__ = _fsdp_class(type(m))
    for m in managed:  # torch.compile reads these: parameters are swapped under it, so it must not take them as given
        m._is_fsdp_managed_module = m._fsdp_use_orig_params = True  # type: ignore[assignment]
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


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
        original: Any = cls.__bases__[1]
        instance = original.__new__(original, *args, **kwargs)
        instance.__init__(*args, **kwargs)
        return instance

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's parameters now (not those of sharded modules below).

        Returns:
            with ``async_op`` a handle to wait on; else None, the parameters are there.
        """
        group = self._get_fsdp_state()._fsdp_param_group
        if group is not None:
            group.lazy_init()
            group.unshard(async_op)
        handle = UnshardHandle(group)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters (not those of sharded modules below)."""
        for group in self._get_fsdp_state()._fsdp_param_groups:
            group.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Change ``reshard_after_forward``; for the root this also replaces the rule that None means False.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward should be a bool here, not {reshard_after_forward!r}")
        for state in self._states(recurse):
            state._auto_reshard_after_forward = False
            for group in state._fsdp_param_groups:
                group.post_forward_mesh_info = post_forward_mesh_info(reshard_after_forward, group.mesh_info)

    # Which all-gather is issued early, see `prefetch`

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """In forward, issue the all-gathers of these modules as soon as this module's parameters are there.

        On CPU this is what makes forward overlap: without it an all-gather is issued by the thread that has to wait
        for it next. Two modules ahead hide more and need one more gathered buffer.

        Raises:
            ValueError: a module that `fully_shard` was not applied to.
        """
        self._get_fsdp_state()._states_to_forward_prefetch = _states_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """The same in backward, instead of the default: the unit whose forward ended before this one's."""
        self._get_fsdp_state()._states_to_backward_prefetch = _states_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False if this module's backward does not read its parameters (an embedding): backward gathers nothing."""
        self._set_on_groups(False, unshard_in_backward=unshard_in_backward)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Gather on the process group's own stream, from and into memory of the compute stream (torch's name)."""
        self._set_on_groups(True, unshard_async_op=async_op)

    # What a micro-batch communicates, see `accumulation`

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. False accumulates whole gradients on each rank, without communication."""
        self._set_on_groups(recurse, reduce_grads=requires_gradient_sync, all_reduce_grads=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward all-reduces the reduce-scattered gradients (hybrid sharding). False keeps partial sums."""
        self._set_on_groups(recurse, all_reduce_grads=requires_all_reduce)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether backward frees the unsharded parameters. False spares the next micro-batch its all-gathers."""
        self._set_on_groups(recurse, reshard_after_backward=reshard_after_backward)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the next backward ends by waiting for all reductions. Pipelines set it for the last micro-batch.

        Until then read no gradient: a reduction may be under way.
        """
        self._get_fsdp_state()._state_ctx.is_last_backward = is_last_backward

    # How gradients are reduced

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the summed gradients of this module's group by ``factor`` instead of the number of ranks."""
        self._set_on_groups(False, gradient_divide_factor=factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The name of `set_gradient_divide_factor` in torch 2.5; deprecated."""
        warnings.warn("Use `set_gradient_divide_factor` instead", DeprecationWarning, stacklevel=2)
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Whether collectives may only sum; dividing is then an operation of its own."""
        self._set_on_groups(False, force_sum_reduction_for_comms=enable)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook(O)`` with the reduced gradients of this module's group, 1D: your own all-reduce, for example.

        Args:
            stream: to run it on, by default the all-reduce stream. Not with a 2-D mesh.

        Raises:
            ValueError: a stream and a 2-D mesh.
        """
        group = self._get_fsdp_state()._fsdp_param_group
        if group is not None and stream is not None and group.mesh_info.replicate_process_group is not None:
            raise ValueError("stream cannot be set when using native HSDP: the hook runs on the all-reduce stream")
        self._set_on_groups(False, _all_reduce_hook=hook, _all_reduce_hook_stream=stream)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """K: how many reduce-scatters may be under way before backward waits for one. Takes effect at lazy init.

        Raises:
            TypeError: not an int. ValueError: below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        self._set_on_groups(recurse, reduce_scatter_max_input_buffers=max_input_buffers)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Give reduce-scatter a communicator of its own, so that it can run beside an all-gather. A collective call."""
        groups = [g for state in self._states(recurse) for g in state._fsdp_param_groups]
        set_separate_reduce_scatter_group([g.mesh_info for g in groups], enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Whether parameters without a gradient are reduced as zeros: needed if ranks use different parameters."""
        self._set_on_groups(recurse, reduce_scatter_unused_params=reduce_scatter_unused_params)

    def set_post_optim_event(self, event: Any) -> None:
        """What the next forward's all-gathers wait for, once, instead of everything on the compute stream."""
        self._get_fsdp_state()._state_ctx.post_optim_event = event

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: forget the failed step and its gradients. Call it on the root."""
        self._get_fsdp_state()._reset_iter_state()

    def set_custom_all_gather(self, *_: Any, **__: Any) -> NoReturn:
        """Left out, as are the three below."""
        raise NotImplementedError("custom collectives and allocators are left out here; use torch's fully_shard")

    set_custom_reduce_scatter = set_custom_all_gather
    set_allocate_memory_from_process_group_for_comm = set_custom_all_gather
    set_symm_mem_for_comm = set_custom_all_gather

    def _get_fsdp_state(self) -> FSDPState:
        state = state_of(cast(nn.Module, self))
        if state is None:
            raise AssertionError(f"No FSDP state found on {type(self).__name__}; apply fully_shard to it first")
        return state

    def _states(self, recurse: bool) -> list[FSDPState]:
        modules = cast(nn.Module, self).modules() if recurse else [cast(nn.Module, self)]
        return [state for m in modules if (state := state_of(m)) is not None]

    def _set_on_groups(self, recurse: bool, **values: Any) -> None:
        for state in self._states(recurse):
            for group in state._fsdp_param_groups:
                for name, value in values.items():
                    setattr(group, name, value)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """``.to()``, ``.double()``, ``.to_empty()``: they change the shards, and must find them registered."""
        self.reshard()
        result = super()._apply(*args, **kwargs)  # type: ignore[misc]
        for group in self._get_fsdp_state()._fsdp_param_groups:
            for fsdp_param in group.fsdp_params:
                fsdp_param.reset_sharded_param()
        return result


def _states_of(modules: list[Any]) -> list[FSDPState]:
    for m in modules:
        if not isinstance(m, FSDPModule):
            raise ValueError(f"only modules given to fully_shard can be prefetched, but got {type(m).__name__}: {m}")
    return [m._get_fsdp_state() for m in modules]


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Gather the parameters around another method as around ``forward``. Does nothing for a module not sharded.

    Raises:
        ValueError: there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module).__name__} does not have a method {method_name!r}")
    method = getattr(module, method_name)

    @functools.wraps(method)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        state = module._get_fsdp_state()
        args, kwargs = state._pre_forward(module, args, kwargs)
        return state._post_forward(module, args, method(*args, **kwargs))

    setattr(module, method_name, gathered)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Let several roots, such as the stages of a pipeline on one rank, share streams. Call it before their forward.

    Raises:
        ValueError: a module that `fully_shard` was not applied to.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"share_comm_ctx takes modules given to fully_shard, but got {type(module).__name__}")
    states = [m._get_fsdp_state() for m in modules]
    for state in states:
        state._comm_ctx = states[0]._comm_ctx
        for group in state._fsdp_param_groups:
            group.comm_ctx = states[0]._comm_ctx


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, _get_device_handle(mesh.device_type).current_device())


def _fsdp_class(cls: type) -> type:
    if cls not in _fsdp_classes:
        _fsdp_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__deepcopy__": _no_deepcopy})
    return _fsdp_classes[cls]


_fsdp_classes: dict[type, type] = {}


def _no_deepcopy(self: nn.Module, memo: object) -> NoReturn:
    raise AssertionError(
        f"FSDP does not support deepcopy: the hooks of {type(self).__name__} would act on the original; copy the "
        "module before fully_shard, or use its state dict"
    )
