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

[Note: who keeps G alive]  In forward, copy-in(i+1) is issued while all-gather(i) may still run, so two flat buffers
must exist. Therefore G(i) is freed not after copy-out(i) but after copy-out(i+1): `FSDPCommContext.all_gather_state`
holds it for one unit longer. In backward the copy-out and the next copy-in are already ordered, and G goes at once.

[Note: who keeps I alive]  At most K reduce-scatter inputs (K = 1) exist at once: before a unit copies its gradients
into I(i), it waits for reduce-scatter(i+1) and drops I(i+1). If reducing takes longer than computing, backward stalls
here; ``set_reduce_scatter_max_input_buffers`` buys the stall off with memory. The last one is waited for at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_sim.mini import accumulation, collectives, versions
from fsdp_sim.mini.autograd import in_backward, outside_functorch, register_post_backward
from fsdp_sim.mini.collectives import AllGatherResult
from fsdp_sim.mini.comm_context import AllGatherState, FSDPCommContext
from fsdp_sim.mini.hsdp import FSDPMeshInfo
from fsdp_sim.mini.labels import log, record_hook, record_step
from fsdp_sim.mini.offload import validate_on_cpu, wait_for_grads
from fsdp_sim.mini.param import FSDPParam, owners_of
from fsdp_sim.mini.precision import dtypes_of_trainable, gradient_division
from fsdp_sim.mini.prefetch import backward_prefetch
from fsdp_sim.mini.reduction import AllReduceState, after_reduce_scatter
from fsdp_sim.states import ShardedState, TrainingState


class FSDPParamGroup:
    """Parameters that are communicated together (torch: `_fsdp_param_group.FSDPParamGroup`).

    Attributes:
        fsdp_params: the parameters, each once, tied ones under all their names.
        post_forward_mesh_info: the mesh that holds them between forward and backward; None: they stay whole.
        reduce_grads, all_reduce_grads, reshard_after_backward: see `accumulation`.
        unshard_async_op, unshard_in_backward: see `prefetch`.
        gradient_divide_factor, force_sum_reduction_for_comms: see `precision`.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        modules: tuple[nn.Module, ...],
        mesh_info: FSDPMeshInfo,
        post_forward_mesh_info: FSDPMeshInfo | None,
        device: torch.device,
        mp_policy: MixedPrecisionPolicy,
        offload_policy: OffloadPolicy,
    ) -> None:
        self.modules = modules
        owners = owners_of(params, modules)
        self.fsdp_params = [FSDPParam(p, owners[p], mesh_info, device, offload_policy) for p in params]
        self.mesh_info = mesh_info
        self.post_forward_mesh_info = post_forward_mesh_info
        self.device = device
        self.mp_policy = mp_policy
        self.offload_policy = offload_policy
        self.comm_ctx = FSDPCommContext(device)  # the root's, from lazy init on
        self._module_fqn: str | None = None  # full name from the root; "" is the root itself
        self._training_state = TrainingState.IDLE
        self._sharded_state = ShardedState.SHARDED
        # set by the user
        self.reduce_grads = self.all_reduce_grads = True
        self.reshard_after_backward = True
        self.unshard_async_op = False
        self.unshard_in_backward = True
        self.reduce_scatter_max_input_buffers = 1
        self.reduce_scatter_unused_params = False
        self.gradient_divide_factor: float | None = None
        self.force_sum_reduction_for_comms = False
        self._all_reduce_hook: Callable[[torch.Tensor], None] | None = None
        self._all_reduce_hook_stream: torch.Stream | None = None
        # of this step
        self._all_gather_result: AllGatherResult | None = None  # issued and not yet waited for
        self._post_forward_indices: list[int] = []  # this group's places in the post-forward order
        self._reshard_after_forward_event: torch.Event | None = None
        self._post_reduce_event: torch.Event | None = None  # end of this group's reduction
        self._all_reduce_state: AllReduceState | None = None
        self._partial_reduce_output: torch.Tensor | None = None  # reduce-scattered, not yet all-reduced
        self._partial_params: list[FSDPParam] = []  # those whose gradients are in it
        self._initialized = False

    @property
    def unit(self) -> str:
        """The name of this group in messages and in the timeline."""
        return self._module_fqn or "root"

    @property
    def is_sharded(self) -> bool:
        return self._sharded_state is ShardedState.SHARDED

    @property
    def is_sharded_post_forward(self) -> bool:
        return self._sharded_state is ShardedState.SHARDED_POST_FORWARD

    @property
    def is_unsharded(self) -> bool:
        return self._sharded_state is ShardedState.UNSHARDED

    @property
    def _reshard_after_forward(self) -> bool:
        return self.post_forward_mesh_info is not None

    def lazy_init(self) -> None:
        """Take over what the user did to the parameters since `fully_shard`, and check it.

        Raises:
            RuntimeError: a parameter is still on the meta device, or not in host memory although it is offloaded.
            AssertionError: trainable parameters of more than one dtype (torch's type).
        """
        if self.is_sharded and not self._initialized:
            for p in self.fsdp_params:
                p.reset_sharded_param()
        if on_meta := [p._param_fqn for p in self.fsdp_params if p.sharded_param.is_meta]:
            raise RuntimeError(
                f"parameters must be materialized before training, but these of unit {self.unit!r} are still on the "
                f"meta device: {on_meta}; call fsdp_sim.mini.init_weights(model, init_fn, seed), or "
                "module.to_empty(device=...) and then initialize them"
            )
        if isinstance(self.offload_policy, CPUOffloadPolicy):
            validate_on_cpu(self.fsdp_params)
        for p in self.fsdp_params:
            p.init_dtype_attrs(self.mp_policy)
        self._orig_dtype, self._reduce_dtype = dtypes_of_trainable(self.fsdp_params, self.unit)
        if not self._initialized:
            for module in {owner for p in self.fsdp_params for owner, _ in p.owners}:
                module.register_state_dict_pre_hook(lambda *_: self._to_sharded())
                module.register_load_state_dict_pre_hook(lambda *_: self._to_sharded())
        self._initialized = True

    # Unshard and reshard

    @outside_functorch
    def unshard(self, async_op: bool = False) -> None:
        """Issue the all-gather. Nothing to do if it is under way already (prefetched) or the parameters are whole."""
        if self._all_gather_result is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and self._training_state is TrainingState.PRE_BACKWARD:
            return
        if self._reshard_after_forward_event is not None:  # the slice was made on the compute stream
            self.comm_ctx.wait_all_gather_streams_on_event(self._reshard_after_forward_event)
            self._reshard_after_forward_event = None
        group, state = self._all_gather_process_group, self._training_state
        with record_step("all_gather", self._module_fqn):
            self._all_gather_result = collectives.foreach_all_gather(
                self.fsdp_params, group, self.comm_ctx, async_op, state
            )

    @outside_functorch
    def wait_for_unshard(self) -> None:
        """Wait for the all-gather, copy its output into the unsharded parameters and register those on the modules."""
        if self._all_gather_result is None:
            return
        ctx, result, self._all_gather_result = self.comm_ctx, self._all_gather_result, None
        in_forward = self._training_state is TrainingState.FORWARD
        previous = ctx.release_all_gather_state() if in_forward else None
        if versions.GATHERED_GOES_BEFORE_COPY_OUT:
            previous = None
        world_size = self._all_gather_process_group.size()
        with record_step("all_gather_copy_out", self._module_fqn):
            collectives.foreach_all_gather_copy_out(result, self.fsdp_params, world_size, ctx)
        self._to_unsharded()
        event = ctx.current_stream().record_event()  # end of the copy-out
        if in_forward and not result.async_op and world_size > 1:  # see [Note: who keeps G alive]
            ctx.all_gather_state = AllGatherState(result, event)
        else:
            ctx.wait_all_gather_streams_on_event(event)
        del previous  # its G goes here

    @outside_functorch
    def reshard(self) -> None:
        """Free the unsharded parameters; after a forward only as far as ``reshard_after_forward`` says."""
        if self._training_state is TrainingState.FORWARD:
            if not self._reshard_after_forward:
                return
            if self.post_forward_mesh_info is not self.mesh_info:
                self._to_sharded_post_forward()
                self._reshard_after_forward_event = self.comm_ctx.current_stream().record_event()
                return
        self._to_sharded()

    @property
    def _all_gather_process_group(self) -> torch.distributed.ProcessGroup:
        if self.is_sharded_post_forward and self.post_forward_mesh_info is not None:
            return self.post_forward_mesh_info.shard_process_group
        return self.mesh_info.shard_process_group

    def _to_unsharded(self) -> None:
        for p in self.fsdp_params:
            p.to_unsharded()
        self._sharded_state = ShardedState.UNSHARDED

    def _to_sharded(self) -> None:
        if self.is_sharded:
            return
        for p in self.fsdp_params:
            p.to_sharded()
        self._sharded_state = ShardedState.SHARDED

    def _to_sharded_post_forward(self) -> None:
        if self.is_sharded_post_forward or self.post_forward_mesh_info is None:
            return
        for p in self.fsdp_params:
            p.to_sharded_post_forward(self.post_forward_mesh_info)
        self._sharded_state = ShardedState.SHARDED_POST_FORWARD

    # Forward

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Make the parameters whole, and arrange that `post_backward` runs when the inputs' gradients are known."""
        with record_hook("pre_forward", self._module_fqn):
            entering = self._training_state is not TrainingState.FORWARD  # a list of modules enters once
            self._training_state = TrainingState.FORWARD
            self.unshard(self.unshard_async_op)
            self.wait_for_unshard()
            return register_post_backward(self, args, kwargs) if entering else (args, kwargs)

    def post_forward(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Free the parameters and note the place in the post-forward order."""
        with record_hook("post_forward", self._module_fqn):
            if not in_backward():  # else activation checkpointing recomputes: backward is about to read the parameters
                self.reshard()
                self._post_forward_indices.append(len(self.comm_ctx.post_forward_order))
                self.comm_ctx.post_forward_order.append(self)
            self._training_state = TrainingState.IDLE
            return output

    # Backward

    def pre_backward(self, default_prefetch: bool) -> None:
        """Make the parameters whole again, and issue the all-gather of the unit that backward reaches next."""
        if self._training_state is TrainingState.PRE_BACKWARD:
            return  # another output of the same forward came first
        with record_hook("pre_backward", self._module_fqn):
            self._training_state = TrainingState.PRE_BACKWARD
            self.unshard(self.unshard_async_op)  # nothing to do if prefetched
            self.wait_for_unshard()
            accumulation.leave_wider_grads(self.fsdp_params, self.reduce_grads)
            if default_prefetch:
                backward_prefetch(self)

    def post_backward(self) -> None:
        """Free the parameters and reduce the gradients. Does nothing if the unit took no part in backward."""
        log("post_backward", self._module_fqn)
        ctx, state_before = self.comm_ctx, self._training_state
        self._training_state = TrainingState.POST_BACKWARD
        with record_step("post_backward_accumulate", self._module_fqn):
            for p in self.fsdp_params:
                accumulation.add_to_accumulated_grad(p)
        with record_step("post_backward_reshard", self._module_fqn):
            params, grads = accumulation.take_unsharded_grads(
                self.fsdp_params if self.reduce_grads else [], self._partial_params, self.reduce_scatter_unused_params
            )
            accumulation.cast_wider_grads(self.fsdp_params)
            if self.reshard_after_backward:
                self.reshard()
            if not self.reduce_grads:  # the whole gradients stay where autograd put them, and accumulate
                for p in self.fsdp_params:
                    accumulation.keep_in_reduce_dtype(p)
        if self.reduce_grads:  # see [Note: who keeps I alive]
            ctx.wait_for_reduce_scatters(ctx.reduce_scatter_max_input_buffers - 1, self._module_fqn)
        if grads:
            with record_step("post_backward_reduce", self._module_fqn):
                # only `pre_backward` sees to it that somebody waits at the end of backward; without it, wait here
                self._reduce(params, grads, wait=state_before is not TrainingState.PRE_BACKWARD)
                only_some_ran = len(self.modules) > 1 and state_before is TrainingState.FORWARD  # a chunked loss
                if only_some_ran and self._post_reduce_event is not None:  # autograd must not reuse its memory yet
                    ctx.current_stream().wait_event(self._post_reduce_event)

    def _reduce(self, params: list[FSDPParam], grads: list[torch.Tensor], wait: bool) -> None:
        """Reduce-scatter the gradients, and queue behind it what makes them sharded gradients.

        Args:
            wait: on CPU, be done with both on return, see [Note: no streams on CPU] in `streams`.
        """
        ctx, info = self.comm_ctx, self.mesh_info
        grad_dtypes = {g.dtype for g in grads}
        if len(grad_dtypes) > 1 and not versions.GRADS_KEEP_ORIGINAL_DTYPE:
            raise AssertionError(f"gradients of one unit must have one dtype, but {self.unit!r} has {grad_dtypes}")
        self._wait_for_post_backward()
        reduce_dtype = self._reduce_dtype or grads[0].dtype
        if self._orig_dtype is None and reduce_dtype != params[0].orig_dtype:
            raise RuntimeError(
                f"all parameters of unit {self.unit!r} were frozen in its first forward, in which FSDP, torch's too, "
                f"looks for the dtype of its gradients, and now there are some in {reduce_dtype}; when you thaw it, "
                "call its unshard(), which looks again, and then its reshard()"
            )
        division = gradient_division(
            info.shard_mesh_size, info.replicate_mesh_size, reduce_dtype, self.gradient_divide_factor,
            self.force_sum_reduction_for_comms, has_premul_sum=not ctx.on_cpu,
        )  # fmt: skip
        group = info.reduce_scatter_process_group or info.shard_process_group
        dtypes = (reduce_dtype, self._orig_dtype or reduce_dtype)
        partial = accumulation.lay_out_partial(self._partial_reduce_output, self._partial_params, params, ctx)
        state = collectives.foreach_reduce_scatter(params, grads, group, ctx, dtypes, division)
        ctx.reduce_scatter_states.append(state)
        self._partial_reduce_output, self._all_reduce_state, self._post_reduce_event = after_reduce_scatter(
            state, partial, info.replicate_process_group, self.all_reduce_grads,
            self._all_reduce_hook, self._all_reduce_hook_stream, ctx,
        )  # fmt: skip
        self._partial_params = [] if self._partial_reduce_output is None else params
        if wait:
            state.finish(ctx)
        ctx._last_post_reduce_events[state.post_reduce_stream] = self._post_reduce_event

    def _wait_for_post_backward(self) -> None:
        """Of a backward that was not the last one this group's reduction may be under way."""
        for state in self.comm_ctx.reduce_scatter_states:
            if state.fsdp_params[0] in self.fsdp_params:
                state.finish(self.comm_ctx)
        reduced = self._all_reduce_state.event if self._all_reduce_state else None
        for event in (self._post_reduce_event, reduced):
            if event is not None:
                self.comm_ctx.current_stream().wait_event(event)
        self._post_reduce_event = self._all_reduce_state = None

    def finalize_backward(self) -> None:
        """At the end of the last backward: wait for what was queued, and drop a gather that was never used."""
        ctx = self.comm_ctx
        ctx.wait_for_last_reductions()
        self._post_reduce_event = self._all_reduce_state = None
        wait_for_grads(self.fsdp_params)
        self._drop_all_gather()
        self._post_forward_indices.clear()

    def _drop_all_gather(self) -> None:
        if self._all_gather_result is not None:
            self._all_gather_result.wait(self.comm_ctx.current_stream())
            self._all_gather_result = None

    def _reset_iter_state(self) -> None:
        """After an exception: wait for what is under way, forget it, and go back to the shards."""
        self._drop_all_gather()
        self._wait_for_post_backward()
        for p in self.fsdp_params:
            p.take_unsharded_grad()
            if versions.RESET_DROPS_SHARDED_GRADS:
                p.sharded_param.grad = None
        accumulation.cast_wider_grads(self.fsdp_params)
        self.comm_ctx.wait_all_gather_streams_on_event(self._reshard_after_forward_event)
        self._reshard_after_forward_event = self._partial_reduce_output = None
        self._partial_params = []
        self._post_forward_indices.clear()
        self._training_state = TrainingState.IDLE
        self._to_sharded()

    def __repr__(self) -> str:
        return f"FSDPParamGroup(fqn={self._module_fqn})"
