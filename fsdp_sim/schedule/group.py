"""`ParamGroup`: one unit's parameters as a small machine that issues what torch issues.

Each method is named after the method of ``torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup``
(torch 2.13) whose instructions it emits, and branches on the same state. How gradients are reduced is in `reduce`.
"""

from __future__ import annotations

from fsdp_sim.schedule.comm import POST_FORWARD, SHARD, AllGatherResult, CommContext
from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.layout import Layout
from fsdp_sim.schedule.lines import NOT_RECORDED
from fsdp_sim.schedule.mesh import Mesh
from fsdp_sim.schedule.optimizer import SCALAR_BYTES
from fsdp_sim.schedule.reduce import GradReduction
from fsdp_sim.spec import TORCH_DTYPES
from fsdp_sim.states import ShardedState, TrainingState
from fsdp_sim.timeline import Lane, Memory, Op


class ParamGroup:
    """The state of one unit's parameters and the hooks that move it.

    Args:
        reshard_after_forward: whether parameters are freed after forward; to a slice of 1/n where
            ``mesh.post_forward_shards`` is less than ``mesh.shards``.
    """

    def __init__(self, name: str, layout: Layout, comm: CommContext, mesh: Mesh, reshard_after_forward: bool) -> None:
        self.name = name
        self.layout = layout
        self.comm = comm
        self.mesh = mesh
        self.cpu: Cpu = comm.cpu
        self.grads = GradReduction(name, layout, comm, mesh)
        self.reshard_after_forward = reshard_after_forward
        self.all_reduce_grads = self.reshard_after_backward = True  # moved by the training loop
        self.training_state = TrainingState.IDLE
        self.sharded_state = ShardedState.SHARDED
        self.slice_alive = False  # the 1/n slice of reshard_after_forward=n
        self._all_gather_result: AllGatherResult | None = None
        self._reshard_after_forward_event = 0
        self._post_forward_indices: list[int] = []

    # -- unshard and reshard

    def unshard(self) -> None:
        """Issue the all-gather, unless one is pending or the parameters are whole."""
        cpu = self.cpu
        cpu.hook("unshard", self.name)
        if self._all_gather_result is not None or self.sharded_state is ShardedState.UNSHARDED:
            return
        if self._reshard_after_forward_event:  # the slice was made on the compute stream
            self.comm.all_gather_streams_wait(self._reshard_after_forward_event)
            self._reshard_after_forward_event = 0
        if self.mesh.shards == 1:
            cpu.record(Lane.COMPUTE)  # torch does so too; nobody waits for it
            self._all_gather_result = AllGatherResult(cpu, self.name, self.layout, 0, 0, Lane.COMPUTE)
            return
        self._foreach_all_gather()

    def _foreach_all_gather(self) -> None:
        cpu, comm, mesh, layout, name = self.cpu, self.comm, self.mesh, self.layout, self.name
        async_op = comm.unshard_async_op
        copy_in, gather = (Lane.COMPUTE,) * 2 if async_op else (Lane.AG_COPY_IN, Lane.ALL_GATHER)
        from_slice = self.sharded_state is ShardedState.SHARDED_POST_FORWARD
        ranks, communicator = (mesh.post_forward_shards, POST_FORWARD) if from_slice else (mesh.shards, SHARD)
        temporary = self._all_gather_inputs(copy_in, from_slice)
        cpu.alloc(Memory.AG_OUTPUT, name, layout.gather_bytes, layout.gather_dtype, copy_in)
        cpu.op(Op.AG_COPY_IN, name, copy_in, layout.gather_bytes // ranks, layout.gather_dtype)
        cpu.wait_stream(gather, copy_in)
        work = cpu.collective(
            Op.ALL_GATHER, name, gather, layout.gather_bytes, layout.gather_dtype, "", ranks, communicator + mesh.of,
            async_op, mesh.stride,
        )  # fmt: skip
        event = cpu.record(gather)
        if temporary:
            cpu.free(Memory.TEMPORARY, name, temporary, layout.gather_dtype, copy_in)
        self._all_gather_result = AllGatherResult(cpu, name, layout, event, work, copy_in, from_slice)

    def _all_gather_inputs(self, lane: Lane, from_slice: bool) -> int:
        """Bring the shards to the device and to the dtype they are gathered in; returns the bytes this takes."""
        cpu, layout, name = self.cpu, self.layout, self.name
        if self.comm.cpu_offload:
            if from_slice:  # the slice is on the device, and cast
                return 0
            n_bytes = layout.gather_bytes // self.mesh.shards
            cpu.alloc(Memory.TEMPORARY, name, n_bytes, layout.gather_dtype, lane)
            for k, shard_bytes in enumerate(layout.shard_bytes):
                cpu.op(Op.H2D, name, lane, shard_bytes)
                self._cast_one(lane, k)
            return n_bytes
        if not layout.casts:
            return 0
        ranks = self.mesh.post_forward_shards if from_slice else self.mesh.shards
        n_bytes = sum(b for b, cast in zip(layout.param_bytes, layout.cast, strict=True) if cast) // ranks
        cpu.alloc(Memory.TEMPORARY, name, n_bytes, layout.gather_dtype, lane)
        if from_slice:  # torch runs the same code, which now only copies: the slice has the dtype already
            cpu.op(Op.AG_COPY_IN, name, lane, n_bytes, layout.gather_dtype)
            return n_bytes
        for k in layout.own_casts:
            self._cast_one(lane, k)
        together = n_bytes - sum(layout.param_bytes[k] for k in layout.own_casts) // ranks
        if together:
            self._cast(lane, together, layout.grad_dtype)
        return n_bytes

    def _cast_one(self, lane: Lane, k: int) -> None:
        """Cast one parameter's shard, if it has to be. A scale that no one has computed needs all ranks' shards."""
        if not self.layout.cast[k]:
            return
        own = k in self.layout.own_casts
        if own and not self.comm.precomputed_scales and self.mesh.shards > 1:
            self.cpu.collective(Op.ALL_REDUCE, self.name, lane, SCALAR_BYTES, "fp32", "MAX", self.mesh.shards, SHARD)
        self._cast(lane, self.layout.param_bytes[k] // self.mesh.shards, "fp8" if own else self.layout.grad_dtype)

    def _cast(self, lane: Lane, n_bytes: int, dtype: str) -> None:
        self.cpu.op(Op.AG_CAST, self.name, lane, n_bytes, dtype, f"to {TORCH_DTYPES[dtype]}")

    def wait_for_unshard(self) -> None:
        """Make compute wait for the all-gather and copy it out into the whole parameters."""
        cpu, comm, layout, name, result = self.cpu, self.comm, self.layout, self.name, self._all_gather_result
        cpu.hook("wait_for_unshard", name)
        if result is None:
            return
        if result.from_slice and self.sharded_state is ShardedState.SHARDED:
            raise ValueError(
                f"the gather of unit {name} was prefetched in an earlier backward that did not use it, over the "
                f"{self.mesh.post_forward_shards} ranks of Plan.reshard_after_forward, and is still pending: torch "
                f"2.13 fails here (split_with_sizes); let is_last_backward be True, or reshard_after_forward True "
                f"or False"
            )
        previous = None
        in_forward = self.training_state is TrainingState.FORWARD
        if in_forward and comm.all_gather_state is not None:
            previous, copied_out = comm.all_gather_state
            comm.all_gather_streams_wait(copied_out)
            comm.all_gather_state = None
            if comm.torch_2_15:
                previous.drop()
                previous = None
        if result.event:
            cpu.wait(Lane.COMPUTE, result.event)
            if result.work:
                cpu.wait(Lane.COMPUTE, result.work, f"{Op.ALL_GATHER}({name})")
            cpu.alloc(Memory.UNSHARDED, name, layout.gather_bytes, layout.gather_dtype, None, len(layout.param_bytes))
            cpu.op(Op.AG_COPY_OUT, name, Lane.COMPUTE, layout.gather_bytes, layout.gather_dtype)
            if layout.by_columns:  # from a copy, chunk by chunk
                cpu.alloc(Memory.TEMPORARY, name, layout.gather_bytes, layout.gather_dtype)
                cpu.op(Op.AG_COPY_OUT, name, Lane.COMPUTE, layout.gather_bytes, layout.gather_dtype, NOT_RECORDED)
                cpu.free(Memory.TEMPORARY, name, layout.gather_bytes, layout.gather_dtype)
        else:
            self._copy_without_gather()
        if self.sharded_state is ShardedState.SHARDED_POST_FORWARD:
            self._free_slice()
        self.sharded_state = ShardedState.UNSHARDED
        copied_out = cpu.record(Lane.COMPUTE)
        if in_forward and result.event and not result.work:
            # The next group waits for this copy-out and frees G: so the next all-gather need not wait for it.
            comm.all_gather_state = (result, copied_out)
        else:
            comm.all_gather_streams_wait(copied_out)
            result.drop()
        self._all_gather_result = None
        if previous is not None:
            previous.drop()

    def _copy_without_gather(self) -> None:
        """One rank: the shard is the parameter."""
        cpu, layout, name = self.cpu, self.layout, self.name
        for k, (shard_bytes, n_bytes) in enumerate(zip(layout.shard_bytes, layout.param_bytes, strict=True)):
            if self.comm.cpu_offload:
                cpu.op(Op.H2D, name, Lane.COMPUTE, shard_bytes)
            self._cast_one(Lane.COMPUTE, k)
            cpu.alloc(Memory.UNSHARDED, name, n_bytes, layout.gather_dtype)
            cpu.op(Op.AG_COPY_OUT, name, Lane.COMPUTE, n_bytes, layout.gather_dtype)

    def reshard(self) -> None:
        """Free the whole parameters; after forward only as far as ``reshard_after_forward`` says."""
        self.cpu.hook("reshard", self.name)
        if self.training_state is TrainingState.FORWARD:
            if not self.reshard_after_forward:
                return
            if self.mesh.post_forward_shards < self.mesh.shards:
                self._to_sharded_post_forward()
                self._reshard_after_forward_event = self.cpu.record(Lane.COMPUTE)
                return
        if self.sharded_state is ShardedState.UNSHARDED:
            layout = self.layout
            self.cpu.free(
                Memory.UNSHARDED, self.name, layout.gather_bytes, layout.gather_dtype, None, len(layout.param_bytes)
            )
        self.sharded_state = ShardedState.SHARDED

    def _to_sharded_post_forward(self) -> None:
        cpu, layout, name, dtype = self.cpu, self.layout, self.name, self.layout.gather_dtype
        had_slice, self.slice_alive = self.slice_alive, True
        for n_bytes in layout.param_bytes:
            part = n_bytes // self.mesh.post_forward_shards
            cpu.alloc(Memory.SHARDED, name, part, dtype)
            cpu.op(Op.CLONE, name, Lane.COMPUTE, part, dtype)
            if had_slice:  # of a forward whose backward did not gather
                cpu.free(Memory.SHARDED, name, part, dtype)
            cpu.free(Memory.UNSHARDED, name, n_bytes, dtype)
        self.sharded_state = ShardedState.SHARDED_POST_FORWARD

    def _free_slice(self) -> None:
        layout = self.layout
        n_bytes = layout.gather_bytes // self.mesh.post_forward_shards
        self.cpu.free(Memory.SHARDED, self.name, n_bytes, layout.gather_dtype, None, len(layout.param_bytes))
        self.slice_alive = False

    # -- the hooks, in the order of a step

    def pre_forward(self) -> None:
        self.cpu.hook("pre_forward", self.name)
        self.training_state = TrainingState.FORWARD
        self.unshard()
        self.wait_for_unshard()

    def post_forward(self) -> None:
        self.cpu.hook("post_forward", self.name)
        self.reshard()
        self._post_forward_indices.append(len(self.comm.post_forward_order))
        self.comm.post_forward_order.append(self.unshard)
        self.training_state = TrainingState.IDLE

    def post_forward_again(self) -> None:
        """Of a forward inside of backward, which does not reshard."""
        self.cpu.hook("post_forward", self.name)
        self.training_state = TrainingState.IDLE

    def pre_backward(self, default_prefetch: bool) -> None:
        self.cpu.hook("pre_backward", self.name)
        if self.training_state is TrainingState.PRE_BACKWARD:
            return
        self.training_state = TrainingState.PRE_BACKWARD
        self.unshard()
        self.wait_for_unshard()
        if default_prefetch and self._post_forward_indices:
            index = self._post_forward_indices.pop()
            if index > 0:
                self.comm.post_forward_order[index - 1]()

    def post_backward(self) -> None:
        """Reshard, then reduce the gradients, or keep them whole."""
        self.cpu.hook("post_backward", self.name)
        self.training_state = TrainingState.POST_BACKWARD
        self.grads.add_to_accumulated()
        if self.reshard_after_backward:
            self.reshard()
        if not self.grads.reduce_grads:
            self.grads.keep_in_reduce_dtype()
            return
        self.comm.wait_for_reduce_scatters(keep=self.comm.max_input_buffers - 1)
        self.grads.reduce(self.all_reduce_grads)

    def finalize_backward(self) -> None:
        """Make compute wait for what was reduced, and drop a gather that was prefetched and never used."""
        cpu, result = self.cpu, self._all_gather_result
        cpu.hook("finalize_backward", self.name)
        self.comm.wait_for_last_reductions()
        self.grads.finalize()
        if result is not None:
            if result.event:
                cpu.wait(Lane.COMPUTE, result.event)
            if result.work:
                cpu.wait(Lane.COMPUTE, result.work, f"{Op.ALL_GATHER}({self.name})")
            result.drop()
            self._all_gather_result = None
        self._post_forward_indices.clear()
