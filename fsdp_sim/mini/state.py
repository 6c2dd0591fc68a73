"""When it happens: the hooks that `fully_shard` puts around the forward and backward of a module.

[Note: four hooks]  PyTorch calls them; nothing in the training script changes.

    pre_forward     a forward pre-hook              make the parameters whole
    post_forward    a forward hook                  free them; hook the outputs
    pre_backward    a tensor hook on the outputs    make the parameters whole again; prefetch the next unit
    post_backward   an autograd node on the inputs  free them; reduce the gradients
    and once per backward, queued in autograd by the first pre_backward: the final callback. It runs post_backward
    where no gradient flowed to the inputs (the root, whose inputs are data), waits for the last reduce-scatter, and
    clears what belonged to this step.

`torch.compile` leaves the hooks out of its graphs (`_disable_dynamo`): they run as Python before and after.

[Note: lazy init]  When `fully_shard` is called on a layer nobody knows yet which module will be the root. The first
state whose forward runs is: there all states below it are collected, get their names, and share one context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.utils import _to_kwargs

from fsdp_sim.mini import versions
from fsdp_sim.mini.autograd import register_pre_backward
from fsdp_sim.mini.comm_context import FSDPCommContext
from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.mini.labels import log, record_hook, record_step
from fsdp_sim.mini.precision import cast_forward_inputs, cast_output_dtype
from fsdp_sim.mini.prefetch import prefetch_unshard
from fsdp_sim.states import TrainingState


class FSDPStateContext:
    """What all states under one root share (torch: the class of the same name).

    Attributes:
        all_states: in the order of the root's ``named_modules()``, the root first.
        iter_forward_root: the state whose forward is the outermost one running. Usually the root.
        post_backward_final_callback_queued: whether this backward has its final callback already.
        is_last_backward: whether this backward ends by waiting for all reductions.
        post_optim_event: what the next forward's all-gathers wait for, instead of all that was computed before.
    """

    def __init__(self) -> None:
        self.all_states: list[FSDPState] = []
        self.iter_forward_root: FSDPState | None = None
        self.post_backward_final_callback_queued = False
        self.is_last_backward = True
        self.post_optim_event: Any = None


class FSDPState:
    """The hooks of one `fully_shard` call (torch: `_fsdp_state.FSDPState`).

    Attributes:
        _fsdp_param_group: None if the modules have no parameters of their own.
        _states_to_forward_prefetch, _states_to_backward_prefetch: set by the user; empty means the default.
        _modules_to_run_forward: of the modules of this state, those whose forward is still to come in this pass.
    """

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        param_group: FSDPParamGroup | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        auto_reshard_after_forward: bool,
    ) -> None:
        self._modules = modules
        self._fsdp_param_group = param_group
        self._device = device
        self._mp_policy = mp_policy
        self._auto_reshard_after_forward = auto_reshard_after_forward  # the user left it open: the root will keep
        self._states_to_forward_prefetch: list[FSDPState] = []
        self._states_to_backward_prefetch: list[FSDPState] = []
        self._is_root: bool | None = None  # known from lazy init on
        self._state_ctx = FSDPStateContext()
        self._comm_ctx = FSDPCommContext(device)
        self._training_state = TrainingState.IDLE
        self._modules_to_run_forward: set[nn.Module] = set()
        for module in modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, prepend=False, always_call=len(modules) > 1)

    @property
    def _fsdp_param_groups(self) -> list[FSDPParamGroup]:
        """torch's name for the same: there a module may have several groups, on different meshes."""
        return [] if self._fsdp_param_group is None else [self._fsdp_param_group]

    # Lazy init

    def _lazy_init(self) -> None:
        """The first forward: this state is the root. Collect the states below, name them, share one context.

        Raises:
            RuntimeError: the root is a list of modules; a module below ran its forward before; parameters on meta.
            ValueError: a parameter is in two groups.
        """
        if self._is_root is not None:
            return
        if len(self._modules) > 1:
            given = [type(m).__name__ for m in self._modules]
            raise RuntimeError(
                f"the root must be a single root module, but fully_shard was given the list {given}; shard its parent"
            )
        root, states = self._modules[0], self._state_ctx.all_states
        names: dict[FSDPState, list[str]] = {}
        for name, module in root.named_modules():
            state = state_of(module)
            if state is None:
                continue
            if state is not self and state._is_root is not None and state not in names:
                states.clear()
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name!r}: it ran its forward before the root "
                    f"{type(root).__name__} did and took itself for the root; run the root's forward first"
                )
            if state not in names:
                states.append(state)
            names.setdefault(state, []).append(name)
        self._comm_ctx.lazy_init()
        for state in states:
            state._is_root = state is self
            state._state_ctx, state._comm_ctx = self._state_ctx, self._comm_ctx
            if (group := state._fsdp_param_group) is not None:
                group.comm_ctx = self._comm_ctx
                group._module_fqn = ", ".join(names[state])
        if self._fsdp_param_group is not None and self._auto_reshard_after_forward:
            # backward begins with the root: what forward freed it would gather at once
            self._fsdp_param_group.post_forward_mesh_info = None
        groups = self._groups()
        self._comm_ctx.reduce_scatter_max_input_buffers = max(
            (g.reduce_scatter_max_input_buffers for g in groups), default=1
        )
        _name_params(root, groups)
        _validate_no_duplicate_params(groups)
        for group in groups:
            group.lazy_init()

    def _groups(self) -> list[FSDPParamGroup]:
        return [g for s in self._state_ctx.all_states for g in s._fsdp_param_groups]

    # Forward

    @_disable_dynamo
    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        group = self._fsdp_param_group
        if len(self._modules) > 1 and not self._modules_to_run_forward:
            self._modules_to_run_forward.update(self._modules)
        if self._training_state is TrainingState.PRE_BACKWARD:  # activation checkpointing recomputes inside backward
            if group is not None and not group.is_unsharded:
                group.unshard()
                group.wait_for_unshard()
            return cast_forward_inputs(self._mp_policy, args, kwargs)
        first_in_pass = self._training_state is not TrainingState.FORWARD  # a list of modules enters once
        self._training_state = TrainingState.FORWARD
        if first_in_pass:
            args, kwargs = self._root_pre_forward(args, kwargs)
        return self._unshard_in_forward(module, args, kwargs, first_in_pass)

    def _unshard_in_forward(self, module: nn.Module, args: Any, kwargs: Any, first_in_pass: bool) -> tuple[Any, Any]:
        """Make the parameters whole, and issue the all-gathers that the user wants early."""
        group = self._fsdp_param_group
        args, kwargs = cast_forward_inputs(self._mp_policy, args, kwargs)
        if group is not None:
            args, kwargs = group.pre_forward(module, args, kwargs)
        if first_in_pass:
            for state in self._states_to_forward_prefetch:
                prefetch_unshard(state._fsdp_param_group, TrainingState.FORWARD)
        return args, kwargs

    def _root_pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Once per forward: no all-gather may read a shard before the optimizer has written it."""
        self._lazy_init()
        ctx, comm = self._state_ctx, self._comm_ctx
        if ctx.iter_forward_root is not None:
            return args, kwargs
        ctx.iter_forward_root = self
        with record_hook("root_pre_forward"):
            if ctx.post_optim_event is not None:
                comm.wait_all_gather_streams_on_event(ctx.post_optim_event)
                ctx.post_optim_event = None
            else:
                comm.all_gather_copy_in_stream.wait_stream(comm.current_stream())
                comm.all_gather_stream.wait_stream(comm.current_stream())
            if self._device.type != "cpu" and (args or kwargs):
                with record_step("inputs_to_device"):
                    (args,), (kwargs,) = _to_kwargs(args, kwargs, self._device, False)
        return args, kwargs

    @_disable_dynamo
    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._ends_pass(module) or self._training_state is TrainingState.PRE_BACKWARD:
            return cast_output_dtype(self._mp_policy, output)
        output = self._complete_forward(module, args, output)
        if self._state_ctx.iter_forward_root is self:
            for state in reversed(self._state_ctx.all_states):  # lists of which not every module was used
                if state is not self and state._modules_to_run_forward:
                    output = cast_output_dtype(state._mp_policy, state._complete_forward(None, None, output))
                    state._modules_to_run_forward.clear()
            self._comm_ctx.release_all_gather_state()
            self._state_ctx.iter_forward_root = None
        return cast_output_dtype(self._mp_policy, output)

    def _ends_pass(self, module: nn.Module) -> bool:
        """A list of modules is done when its last one is; a second call in the pass (a chunked loss) ends nothing."""
        if len(self._modules) == 1:
            return True
        to_run = self._modules_to_run_forward
        if module not in to_run:
            return False
        to_run.remove(module)
        return not to_run

    def _complete_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        group = self._fsdp_param_group
        if group is not None:
            output = group.post_forward(module, args, output)
        names = ", ".join(type(m).__name__ for m in self._modules)
        output = register_pre_backward(output, self._pre_backward, names)
        self._training_state = TrainingState.IDLE
        return output

    # Backward

    @_disable_dynamo
    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        self._training_state = TrainingState.PRE_BACKWARD
        self._queue_final_callback()
        self._unshard_in_backward()
        return grad

    def _unshard_in_backward(self) -> None:
        """The same in backward, where the default is to issue the next unit's early."""
        if self._fsdp_param_group is not None:
            self._fsdp_param_group.pre_backward(default_prefetch=not self._states_to_backward_prefetch)
        for state in self._states_to_backward_prefetch:
            prefetch_unshard(state._fsdp_param_group, TrainingState.PRE_BACKWARD)

    def _queue_final_callback(self) -> None:
        if not self._state_ctx.post_backward_final_callback_queued:
            self._state_ctx.post_backward_final_callback_queued = True
            Variable._execution_engine.queue_callback(self._root_post_backward_final_callback)

    def _root_post_backward_final_callback(self) -> None:
        log("root_post_backward")
        with record_step("root_post_backward_callback"):
            self._end_backward()

    def _end_backward(self) -> None:
        """Finish what backward did not reach, wait for the last reductions, and clear what belonged to this step."""
        ctx, comm = self._state_ctx, self._comm_ctx
        ctx.iter_forward_root = None
        for state in ctx.all_states:
            state._modules_to_run_forward.clear()
            if (group := state._fsdp_param_group) is not None:
                if group._training_state is not TrainingState.POST_BACKWARD:
                    group.post_backward()  # no gradient flowed to its inputs
                group._training_state = TrainingState.IDLE
            state._training_state = TrainingState.IDLE
            if group is not None and ctx.is_last_backward and not versions.WAITS_BEFORE_FINALIZE:
                group.finalize_backward()
        if ctx.is_last_backward and versions.WAITS_BEFORE_FINALIZE:
            comm.wait_for_last_reductions()
            for state in ctx.all_states:
                if state._fsdp_param_group is not None:
                    state._fsdp_param_group.finalize_backward()
        if ctx.is_last_backward:
            comm.post_forward_order.clear()
            comm.wait_for_all_reduce_scatters()
            comm.reduce_scatter_states.clear()
        ctx.post_backward_final_callback_queued = False

    def _reset_iter_state(self) -> None:
        """After an exception in forward or backward: forget the step, so that the next one can start.

        Raises:
            RuntimeError: this is not the root, or no forward has run yet.
        """
        if not self._is_root:
            name = type(self._modules[0]).__name__
            why = f"{name} is inside it" if self._is_root is False else f"{name} never ran: there is nothing to reset"
            raise RuntimeError(f"reset_iter_state must be called on the root module, whose forward is run first; {why}")
        ctx, comm = self._state_ctx, self._comm_ctx
        if comm.all_gather_state is not None:
            if comm.all_gather_state.event is not None:
                comm.current_stream().wait_event(comm.all_gather_state.event)
            comm.all_gather_state = None
        comm.wait_for_all_reduce_scatters()
        comm.wait_for_last_reductions()
        under_way, comm.reduce_scatter_states = comm.reduce_scatter_states, []
        comm.post_forward_order.clear()
        for state in ctx.all_states:
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
            for group in state._fsdp_param_groups:
                group._reset_iter_state()
        del under_way  # their inputs: nothing queued reads them any more
        ctx.iter_forward_root = None
        ctx.post_backward_final_callback_queued = False


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module that `fully_shard` was applied to, else None."""
    return module.__dict__.get("_fsdp_state")


def _name_params(root: nn.Module, groups: list[FSDPParamGroup]) -> None:
    of_param = {id(p.sharded_param): p for group in groups for p in group.fsdp_params}
    for name, param in root.named_parameters():
        if id(param) in of_param:
            of_param[id(param)]._param_fqn = name


def _validate_no_duplicate_params(groups: list[FSDPParamGroup]) -> None:
    seen: dict[int, str] = {}
    for group in groups:
        for p in group.fsdp_params:
            if p._orig_param_uid in seen:
                raise ValueError(
                    f"parameter {p._param_fqn!r} of unit {group.unit!r} is already managed by unit "
                    f"{seen[p._orig_param_uid]!r}; tied parameters must be in one group: "
                    "fully_shard([module_a, module_b]), or leave both to their parent"
                )
            seen[p._orig_param_uid] = group.unit
