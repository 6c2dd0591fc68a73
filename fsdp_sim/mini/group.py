"""What happens to the parameters of one `fully_shard` call: gathered together, freed together, reduced together.

[Note: the life of a unit in one step]

    forward    unshard            issue the all-gather                          SHARDED
               wait_for_unshard   wait for it, copy out                         UNSHARDED
               ... compute ...
               reshard            free, unless told to keep                     SHARDED
    backward   unshard            again, issued one unit early (prefetch)
               wait_for_unshard                                                 UNSHARDED
               ... compute ...
               post_backward      free; reduce-scatter the gradients            SHARDED

[Note: who keeps G alive]  In forward, torch issues copy-in(i+1) while all-gather(i) may still run, so two flat buffers
must exist. Therefore G(i) is freed not after copy-out(i) but after copy-out(i+1): `FSDPCommContext.all_gather_state`
holds it for one unit longer. In backward the copy-out and the next copy-in are already ordered, and G goes at once.

[Note: who keeps I alive]  At most K reduce-scatter inputs (K = 1) exist at once: before a unit copies its gradients
into I(i), it waits for reduce-scatter(i+1) and drops I(i+1). If reducing takes longer than computing, backward stalls
here. The last one is waited for at the end of backward.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _apply_to_tensors

from fsdp_sim.mini import recording
from fsdp_sim.mini.collectives import (
    AllGatherResult,
    ReduceScatterState,
    foreach_all_gather,
    foreach_all_gather_copy_out,
    foreach_reduce,
    foreach_reduce_finish,
)
from fsdp_sim.mini.param import FSDPParam, Owner, ShardedState
from fsdp_sim.timeline import Lane, Memory, Op


class TrainingState(Enum):
    """Where a unit is in the step."""

    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    IDLE = auto()


@dataclass(frozen=True)
class AllGatherState:
    """The all-gather whose output must outlive its copy-out, see [Note: who keeps G alive]."""

    result: AllGatherResult
    copy_out: int  # torch: the copy-out event


class FSDPCommContext:
    """Communication state shared by all groups under one root (torch: also the streams).

    Attributes:
        all_gather_state: the last all-gather of this forward, see [Note: who keeps G alive].
        reduce_scatter_states: reduce-scatters under way, oldest first, see [Note: who keeps I alive].
        reduce_scatter_max_input_buffers: K.
        post_forward_order: groups in the order in which their forward ended; backward prefetch reads it from the end.
        copied_out: the copy-out that the all-gather streams have been told to wait for (its ``seq`` in the timeline).
        compute: names the compute between hooks in the timeline.
    """

    def __init__(self) -> None:
        self.all_gather_state: AllGatherState | None = None
        self.reduce_scatter_states: deque[ReduceScatterState] = deque()
        self.reduce_scatter_max_input_buffers = 1
        self.post_forward_order: list[FSDPParamGroup] = []
        self.copied_out = -1
        self.compute = recording.ComputeSegments()

    def release_all_gather_state(self) -> None:
        """Free the gathered buffer that was kept for one unit longer; later copy-ins wait for its copy-out."""
        if self.all_gather_state is not None:
            self.copied_out = self.all_gather_state.copy_out
            self.all_gather_state.result.record_free()
            self.all_gather_state = None

    def wait_for_reduce_scatters(self, keep: int) -> int:
        """Wait for the oldest reduce-scatters until ``keep`` are left under way; their sharded gradients are ready.

        Returns:
            the ``seq`` of the last one waited for, -1 if there was none.
        """
        seq = -1
        while len(self.reduce_scatter_states) > keep:
            oldest = self.reduce_scatter_states.popleft()
            foreach_reduce_finish(oldest)  # I dies with `oldest`
            seq = oldest.pending.seq if oldest.pending else -1
        return seq


class FSDPParamGroup:
    """Parameters that are communicated together (torch: `_fsdp_param_group.FSDPParamGroup`).

    Attributes:
        fsdp_params: the parameters, each once, tied ones under all their names.
        reshard_after_forward: whether forward frees the unsharded parameters.
        reduce_grads: False while gradients are accumulated without communication.
        segments: names of the first and last piece of compute of this unit in the timeline.
    """

    def __init__(
        self, params: list[nn.Parameter], modules: tuple[nn.Module, ...], mesh: DeviceMesh, reshard_after_forward: bool
    ) -> None:
        self.modules = modules
        owners = _owners(params, modules)
        self.fsdp_params = [FSDPParam(p, owners[p], mesh) for p in params]
        self.process_group = mesh.get_group()
        self.reshard_after_forward = reshard_after_forward
        self.reshard_after_backward = True
        self.reduce_grads = True
        self.comm_ctx = FSDPCommContext()  # the root's, from lazy init on
        self.segments = ("", "")
        self._module_fqn: str | None = None  # full name from the root; "" is the root itself
        self._training_state = TrainingState.IDLE
        self._sharded_state = ShardedState.SHARDED
        self._all_gather_result: AllGatherResult | None = None  # issued and not yet waited for
        self._copy_out = -1  # seq of the last copy-out
        self._post_forward_indices: list[int] = []  # this group's places in the post-forward order
        self._initialized = False

    @property
    def unit(self) -> str:
        """The name of this group in the timeline."""
        return self._module_fqn or "root"

    @property
    def is_unsharded(self) -> bool:
        return self._sharded_state is ShardedState.UNSHARDED

    def lazy_init(self) -> None:
        """Take over what the user did to the parameters since `fully_shard`, and check it.

        Raises:
            RuntimeError: a parameter is still on the meta device.
            ValueError: the parameters have more than one dtype, or one that is not floating point.
        """
        if self._initialized:
            return
        for p in self.fsdp_params:
            p.reset_sharded_param()
        if on_meta := [p.fqn for p in self.fsdp_params if p.all_gather_input.is_meta]:
            raise RuntimeError(
                f"parameters must be materialized before training, but these of unit {self.unit!r} are still on the "
                f"meta device: {on_meta}; call module.to_empty(device=...) and then initialize them"
            )
        dtypes = {p.fqn: p.all_gather_input.dtype for p in self.fsdp_params}
        if len(set(dtypes.values())) != 1 or not next(iter(dtypes.values())).is_floating_point:
            raise ValueError(f"unit {self.unit!r} must have parameters of one floating-point dtype, but has {dtypes}")
        for module in {owner for p in self.fsdp_params for owner, _ in p.owners}:
            module.register_state_dict_pre_hook(lambda *_: self._to_sharded())
            module.register_load_state_dict_pre_hook(lambda *_: self._to_sharded())
        self._initialized = True

    # Unshard and reshard

    def unshard(self) -> None:
        """Issue the all-gather. Nothing to do if it is under way already (prefetched) or the parameters are whole."""
        if self._all_gather_result is None and not self.is_unsharded:
            self._all_gather_result = foreach_all_gather(
                self.fsdp_params, self.process_group, self.unit, self.comm_ctx.copied_out
            )

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, copy its output into the unsharded parameters and register those on the modules."""
        if self._all_gather_result is None:
            return
        result, self._all_gather_result = self._all_gather_result, None
        self._copy_out = foreach_all_gather_copy_out(result, self.fsdp_params)
        self._to_unsharded()
        if self._training_state is TrainingState.FORWARD:  # see [Note: who keeps G alive]
            self.comm_ctx.release_all_gather_state()
            self.comm_ctx.all_gather_state = AllGatherState(result, self._copy_out)
        else:
            self.comm_ctx.copied_out = self._copy_out
            result.record_free()

    def reshard(self) -> None:
        """Free the unsharded parameters; after a forward only if ``reshard_after_forward``."""
        if self._training_state is TrainingState.FORWARD and not self.reshard_after_forward:
            return
        self._to_sharded()

    def _to_unsharded(self) -> None:
        for p in self.fsdp_params:
            p.to_unsharded()
        self._sharded_state = ShardedState.UNSHARDED
        recording.watch_grads(self)

    def _to_sharded(self) -> None:
        if not self.is_unsharded:
            return
        for p in self.fsdp_params:
            p.to_sharded()
            recording.freed(Memory.UNSHARDED, self.unit, p.unsharded_bytes, Lane.COMPUTE)
        self._sharded_state = ShardedState.SHARDED

    # Forward

    def pre_forward(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the parameters whole, and arrange that `post_backward` runs when the inputs' gradients are known."""
        entering = self._training_state is not TrainingState.FORWARD  # a list of modules enters once
        self._training_state = TrainingState.FORWARD
        self.unshard()
        self.wait_for_unshard()
        return self._register_post_backward_hook(args, kwargs) if entering else (args, kwargs)

    def post_forward(self) -> None:
        if not _in_backward():  # else: activation checkpointing recomputes, backward is about to read the parameters
            self.reshard()
            self._post_forward_indices.append(len(self.comm_ctx.post_forward_order))
            self.comm_ctx.post_forward_order.append(self)
        self._training_state = TrainingState.IDLE

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        inputs = grad_tensors((args, kwargs)) if torch.is_grad_enabled() else []
        if not inputs:
            return args, kwargs  # no gradient flows to the inputs: the final callback runs `post_backward`
        outputs = iter(RegisterPostBackwardFunction.apply(self, *inputs))
        return _apply_to_tensors(lambda t: next(outputs) if t.requires_grad else t, (args, kwargs))

    # Backward

    def pre_backward(self, default_prefetch: bool) -> None:
        """Make the parameters whole again, and issue the all-gather of the unit that backward reaches next."""
        self._training_state = TrainingState.PRE_BACKWARD
        self.unshard()  # nothing to do if prefetched
        self.wait_for_unshard()
        if default_prefetch and self._post_forward_indices:
            index = self._post_forward_indices.pop()
            if index > 0:
                self.comm_ctx.post_forward_order[index - 1].unshard()

    def post_backward(self) -> None:
        """Free the parameters and reduce-scatter the gradients. Does nothing if the unit took no part in backward."""
        ran_backward = self._training_state is TrainingState.PRE_BACKWARD
        if ran_backward:
            self.comm_ctx.compute.close_unit(Op.BWD, self.segments[0], self._copy_out)
        self._training_state = TrainingState.POST_BACKWARD
        params_with_grad = [p for p in self.fsdp_params if self.reduce_grads and p.unsharded_grad is not None]
        grads = [p.take_unsharded_grad() for p in params_with_grad]  # the only references: freed after the copy-in
        if self.reshard_after_backward:
            self.reshard()
        if self.reduce_grads:  # else the whole gradients stay where autograd put them, and accumulate
            # see [Note: who keeps I alive]
            waited_for = self.comm_ctx.wait_for_reduce_scatters(keep=self.comm_ctx.reduce_scatter_max_input_buffers - 1)
            if grads:
                state = foreach_reduce(params_with_grad, grads, self.process_group, self.unit, waited_for)
                self.comm_ctx.reduce_scatter_states.append(state)
        if ran_backward:
            self.comm_ctx.compute.unit_done()

    def finalize_backward(self) -> None:
        """At the end of backward: wait for a gather that was prefetched and never used, and drop it."""
        if self._all_gather_result is not None:
            if self._all_gather_result.pending is not None:
                self._all_gather_result.pending.wait()
            self._all_gather_result.record_free()
            self._all_gather_result = None
        self._post_forward_indices.clear()
        self._training_state = TrainingState.IDLE

    def __repr__(self) -> str:
        return f"FSDPParamGroup(fqn={self._module_fqn})"


class RegisterPostBackwardFunction(torch.autograd.Function):
    """The identity on a unit's inputs. Its backward runs once their gradients are known: the unit's own is done."""

    @staticmethod
    def forward(ctx: Any, group: FSDPParamGroup, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.group = group
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.group.post_backward()
        return (None, *grads)


def grad_tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors that need a gradient in nested containers and dataclasses, in a fixed order."""
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad:
            found.append(tensor)
        return tensor

    _apply_to_tensors(keep, tree)
    return found


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _owners(params: list[nn.Parameter], modules: tuple[nn.Module, ...]) -> dict[nn.Parameter, list[Owner]]:
    """For each parameter every place it is registered in: tied weights, and modules that occur twice."""
    owners: dict[nn.Parameter, list[Owner]] = {p: [] for p in params}
    for module in modules:
        for submodule in module.modules():
            for name, param in submodule._parameters.items():
                if param in owners and (submodule, name) not in owners[param]:
                    owners[param].append((submodule, name))
    return owners
