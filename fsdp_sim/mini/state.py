"""When it happens: the hooks that `fully_shard` puts around the forward and backward of a module.

[Note: four hooks]  PyTorch calls them; nothing in the training script changes.

    pre_forward     a forward pre-hook              make the parameters whole
    post_forward    a forward hook                  free them; hook the outputs
    pre_backward    a tensor hook on the outputs    make the parameters whole again; prefetch the next unit
    post_backward   an autograd node on the inputs  free them; reduce the gradients
    and once per backward, queued in autograd by the first pre_backward: the final callback. It runs post_backward
    where no gradient flowed to the inputs (the root, whose inputs are data), waits for the last reduce-scatter, and
    clears what belonged to this step.

[Note: lazy init]  When `fully_shard` is called on a layer nobody knows yet which module will be the root. The first
state whose forward runs is: there all states below it are collected, get their names, and share one context.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from fsdp_sim.mini import recording
from fsdp_sim.mini.group import FSDPCommContext, FSDPParamGroup, TrainingState, grad_tensors
from fsdp_sim.timeline import Op


class FSDPStateContext:
    """What all states under one root share.

    Attributes:
        all_states: in the order of the root's ``named_modules()``, the root first.
        iter_forward_root: the state whose forward is the outermost one running. Usually the root.
        post_backward_final_callback_queued: whether this backward has its final callback already.
    """

    def __init__(self) -> None:
        self.all_states: list[FSDPState] = []
        self.iter_forward_root: FSDPState | None = None
        self.post_backward_final_callback_queued = False


class FSDPState:
    """The hooks of one `fully_shard` call (torch: `_fsdp_state.FSDPState`).

    Attributes:
        param_group: None if the modules have no parameters of their own.
        states_to_forward_prefetch, states_to_backward_prefetch: set by the user; empty means the default.
    """

    def __init__(
        self, modules: tuple[nn.Module, ...], param_group: FSDPParamGroup | None, auto_reshard_after_forward: bool
    ) -> None:
        self.modules = modules
        self.param_group = param_group
        self.auto_reshard_after_forward = auto_reshard_after_forward  # the user left it open: the root will keep
        self.states_to_forward_prefetch: list[FSDPState] = []
        self.states_to_backward_prefetch: list[FSDPState] = []
        self._is_root: bool | None = None  # known from lazy init on
        self._state_ctx = FSDPStateContext()
        self._comm_ctx = FSDPCommContext()
        self._training_state = TrainingState.IDLE
        self._modules_to_run_forward: set[nn.Module] = set()  # of a list of modules, those still to come
        for module in modules:
            module.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._post_forward, prepend=False)

    # Lazy init

    def _lazy_init(self) -> None:
        """The first forward: this state is the root. Collect the states below, name them, share one context.

        Raises:
            RuntimeError: the root is a list of modules; a module below ran its forward before; parameters on meta.
            ValueError: a parameter is in two groups.
        """
        if self._is_root is not None:
            return
        if len(self.modules) > 1:
            given = [type(m).__name__ for m in self.modules]
            raise RuntimeError(
                f"the root must be one module, but fully_shard was given the list {given}; shard its parent"
            )
        root, states = self.modules[0], self._state_ctx.all_states
        names: dict[FSDPState, list[str]] = {}
        for name, module in root.named_modules():
            state = state_of(module)
            if state is None:
                continue
            if state is not self and state._is_root is not None and state not in names:
                raise RuntimeError(
                    f"{name!r} ran its forward before the root {type(root).__name__} did and took itself for the root; "
                    "run the root's forward first"
                )
            if state not in names:
                states.append(state)
            names.setdefault(state, []).append(name)
        for state in states:
            state._is_root = state is self
            state._state_ctx, state._comm_ctx = self._state_ctx, self._comm_ctx
            if state.param_group is not None:
                state.param_group.comm_ctx = self._comm_ctx
                state.param_group._module_fqn = ", ".join(names[state])
        if self.param_group is not None and self.auto_reshard_after_forward:
            self.param_group.reshard_after_forward = False  # backward begins with the root: it would gather at once
        _name_params(root, self._groups())
        _validate_no_duplicate_params(self._groups())
        for group in self._groups():
            group.lazy_init()
            group.segments = _segments(group, [n for state_names in names.values() for n in state_names])
        recording.install()

    def _groups(self) -> list[FSDPParamGroup]:
        return [s.param_group for s in self._state_ctx.all_states if s.param_group is not None]

    # Forward

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        group = self.param_group
        if self._training_state is TrainingState.PRE_BACKWARD:  # activation checkpointing recomputes inside backward
            if group is not None:
                group.unshard()
                group.wait_for_unshard()
            return args, kwargs
        first_in_pass = self._training_state is not TrainingState.FORWARD
        if first_in_pass:
            self._lazy_init()
            self._begin_forward_if_outermost()
            self._modules_to_run_forward = set(self.modules)
        self._training_state = TrainingState.FORWARD
        self._comm_ctx.compute.close()
        if group is not None:
            args, kwargs = group.pre_forward(args, kwargs)
        if first_in_pass:
            for state in self.states_to_forward_prefetch:
                if state.param_group is not None:
                    state.param_group.unshard()
        if group is not None:
            self._comm_ctx.compute.open(Op.FWD, group.segments[0], group._copy_out)
        return args, kwargs

    def _begin_forward_if_outermost(self) -> None:
        if self._state_ctx.iter_forward_root is None:
            self._state_ctx.iter_forward_root = self
            self._comm_ctx.copied_out = -1  # CUDA: here the all-gather streams wait for the optimizer
            recording.forward_begins(self._groups())

    def _post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._training_state is TrainingState.PRE_BACKWARD:
            return output
        self._modules_to_run_forward.discard(module)
        if self._modules_to_run_forward:
            return output  # a list of modules is done when its last one is
        self._complete_forward(output)
        if self._state_ctx.iter_forward_root is self:
            for state in reversed(self._state_ctx.all_states):  # lists of which one module was not used
                if state is not self and state._modules_to_run_forward:
                    state._complete_forward(output)
            self._comm_ctx.release_all_gather_state()
            self._state_ctx.iter_forward_root = None
        return output

    def _complete_forward(self, output: Any) -> None:
        group = self.param_group
        if group is not None:
            self._comm_ctx.compute.close_unit(Op.FWD, group.segments[1], group._copy_out)
            group.post_forward()
        if torch.is_grad_enabled():
            for tensor in grad_tensors(output):
                tensor.register_hook(self._pre_backward)
        self._modules_to_run_forward.clear()
        self._training_state = TrainingState.IDLE
        self._comm_ctx.compute.unit_done()

    # Backward

    def _pre_backward(self, grad: torch.Tensor) -> torch.Tensor:
        self._queue_final_callback()
        group = self.param_group
        first_output = group is None or group._training_state is not TrainingState.PRE_BACKWARD
        self._training_state = TrainingState.PRE_BACKWARD
        if first_output:
            self._comm_ctx.compute.close()
            if group is not None:
                group.pre_backward(default_prefetch=not self.states_to_backward_prefetch)
            for state in self.states_to_backward_prefetch:
                if state.param_group is not None:
                    state.param_group.unshard()
            if group is not None:
                self._comm_ctx.compute.open(Op.BWD, group.segments[1], group._copy_out)
        return grad

    def _queue_final_callback(self) -> None:
        if not self._state_ctx.post_backward_final_callback_queued:
            self._state_ctx.post_backward_final_callback_queued = True
            recording.backward_begins()
            Variable._execution_engine.queue_callback(self._root_post_backward_final_callback)

    def _root_post_backward_final_callback(self) -> None:
        for state in self._state_ctx.all_states:
            group = state.param_group
            if group is not None:
                if group._training_state is not TrainingState.POST_BACKWARD:
                    group.post_backward()
                group.finalize_backward()
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
        self._comm_ctx.compute.close()
        self._comm_ctx.post_forward_order.clear()
        last = self._comm_ctx.wait_for_reduce_scatters(keep=0)
        self._state_ctx.iter_forward_root = None
        self._state_ctx.post_backward_final_callback_queued = False
        recording.backward_ended(last)


def state_of(module: nn.Module) -> FSDPState | None:
    """The state of a module that `fully_shard` was applied to, else None."""
    return getattr(module, "_fsdp_state", None)


def _name_params(root: nn.Module, groups: list[FSDPParamGroup]) -> None:
    of_param = {id(p.sharded_param): p for group in groups for p in group.fsdp_params}
    for name, param in root.named_parameters():
        if id(param) in of_param:
            of_param[id(param)].fqn = name


def _validate_no_duplicate_params(groups: list[FSDPParamGroup]) -> None:
    seen: dict[int, str] = {}
    for group in groups:
        for p in group.fsdp_params:
            if p.uid in seen:
                raise ValueError(
                    f"parameter {p.fqn!r} of unit {group.unit!r} is already managed by unit {seen[p.uid]!r}; tied "
                    "parameters must be in one group: fully_shard([module_a, module_b]), or leave both to their parent"
                )
            seen[p.uid] = group.unit


def _segments(group: FSDPParamGroup, module_fqns: list[str]) -> tuple[str, str]:
    """Names of a unit's first and last piece of compute, see `recording`."""
    own = group.unit.split(", ") if group._module_fqn else [""]
    prefixes = tuple(f"{fqn}." if fqn else "" for fqn in own)
    if not any(name not in own and name.startswith(prefixes) for name in module_fqns):
        return group.unit, group.unit
    prefix = f"{group._module_fqn}." if group._module_fqn else ""
    return f"{prefix}embed", f"{prefix}head"
