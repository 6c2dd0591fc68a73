"""`GradReduction`: from the whole gradients that autograd leaves to the sharded ones that the optimizer reads.

Follows ``foreach_reduce`` of torch 2.13 (``_fsdp_collectives``) and ``FSDPParamGroup.post_backward`` around it.

[Note: who keeps O alive]  Sharded gradients are views of the reduce-scatter's output O, so it lives until ``zero_grad``
drops the last of them. Hybrid sharding all-reduces O in place on another stream, and must not let the next
reduce-scatter have that memory: the group holds it until the end of backward, also where it was cast into another O.
"""

from __future__ import annotations

from fsdp_sim.schedule.comm import REPLICATE, CommContext
from fsdp_sim.schedule.layout import Layout
from fsdp_sim.schedule.lines import NOT_RECORDED
from fsdp_sim.schedule.mesh import Mesh
from fsdp_sim.spec import DTYPE_BYTES, TORCH_DTYPES
from fsdp_sim.timeline import Lane, Memory, Op


class GradReduction:
    """The gradients of one unit.

    Attributes:
        reduce_grads: whether this backward reduces them; the training loop moves it.
        whole: bytes of the whole gradients that autograd left, by parameter.
        accumulated: the same of those kept in the reduce dtype from micro-batches without sync.
        to_add: bytes of gradients, added up over the runs of the unit, that go into whole ones.
        has_sharded: sharded gradients exist, as views of O.
    """

    def __init__(self, name: str, layout: Layout, comm: CommContext, mesh: Mesh) -> None:
        self.name, self.layout, self.comm, self.mesh, self.cpu = name, layout, comm, mesh, comm.cpu
        self.reduce_grads = True
        self.whole: dict[int, int] = {}
        self.accumulated: dict[int, int] = {}
        self._dtype_of_whole = layout.grad_dtype
        self.to_add: list[int] = []
        self._incomplete: set[int] = set()  # autograd has begun to add these up
        self.has_sharded = False
        self._partial = False  # an O that was reduce-scattered and not yet all-reduced
        self._held: tuple[str, ...] = ()  # the all-reduce state keeps an O alive; detail of its free
        self._post_reduce_event = 0
        self._all_reduce_event = 0
        self._offload_events: list[int] = []
        self._output_bytes = layout.reduce_bytes // mesh.shards
        n_elements = self._output_bytes // DTYPE_BYTES[layout.reduce_dtype]
        self._sharded_bytes = n_elements * DTYPE_BYTES[layout.orig_dtype]
        self._sharded_lane = Lane.REDUCE_SCATTER

    # -- whole gradients

    def computed(self, grads: tuple[tuple[int, int], ...], complete: bool = True) -> None:
        """Autograd writes whole gradients, (parameter, bytes); those left from before are added to in place.

        Of a unit that runs several times autograd hands them out when they are ``complete``. From torch 2.15 on it
        casts those that begin to accumulate without sync; before, `keep_in_reduce_dtype` does.
        """
        dtype, incomplete = self.layout.grad_dtype, self._incomplete
        if self._casts_at_once and (wide := self.layout.upcast_dtype):
            grads = tuple((k, n_bytes // DTYPE_BYTES[dtype] * DTYPE_BYTES[wide]) for k, n_bytes in grads)
            dtype = wide
        self._dtype_of_whole = dtype
        if not complete:
            new = [n_bytes for k, n_bytes in grads if k not in incomplete]
            incomplete |= {k for k, _ in grads}
        else:
            new = [n_bytes for k, n_bytes in grads if k not in incomplete and k not in self.whole]
            self.to_add = [n_bytes for k, n_bytes in grads if k in incomplete and k in self.whole]
            incomplete -= {k for k, _ in grads}
            self.whole.update(grads)
        if new:
            self.cpu.alloc(Memory.UNSHARDED_GRAD, self.name, sum(new), dtype, None, len(new))

    @property
    def _casts_at_once(self) -> bool:
        return self.comm.torch_2_15 and (bool(self.whole) or not self.reduce_grads)

    def added(self) -> None:
        """What autograd added up over several runs is now in the gradients of earlier micro-batches."""
        total, n = sum(self.to_add), len(self.to_add)
        self.cpu.free(Memory.UNSHARDED_GRAD, self.name, total, self._dtype_of_whole, None, n)
        self.to_add = []

    def add_to_accumulated(self) -> None:
        """Add this micro-batch's gradients to those kept in the reduce dtype, if there are any."""
        if not self.accumulated:
            return
        for n_bytes in self.whole.values():
            self.cpu.op(Op.ACCUMULATE, self.name, Lane.COMPUTE, n_bytes, self.layout.upcast_dtype or "")
            self.cpu.free(Memory.UNSHARDED_GRAD, self.name, n_bytes, self.layout.grad_dtype)
        self.whole.clear()

    def keep_in_reduce_dtype(self) -> None:
        """Without sync: whole gradients stay, in the reduce dtype."""
        dtype, of_grad = self.layout.upcast_dtype, self.layout.grad_dtype
        if dtype is None or self.comm.torch_2_15:
            return
        for k, n_bytes in self.whole.items():
            self.accumulated[k] = n_bytes // DTYPE_BYTES[of_grad] * DTYPE_BYTES[dtype]
            self.cpu.alloc(Memory.UNSHARDED_GRAD, self.name, self.accumulated[k], dtype)
            self.cpu.op(Op.UPCAST, self.name, Lane.COMPUTE, self.accumulated[k], dtype)
            self.cpu.free(Memory.UNSHARDED_GRAD, self.name, n_bytes, of_grad)
        self.whole.clear()

    # -- reduction

    def reduce(self, all_reduce: bool) -> None:
        """Reduce-scatter, all-reduce between replicas, and make the result the sharded gradients."""
        grads, dtype = (self.accumulated, self.layout.reduce_dtype) if self.accumulated else (
            self.whole, self._dtype_of_whole
        )  # fmt: skip
        adds_to_partial = self._partial and self.comm.torch_2_15  # then without gradients too: zeros take their place
        if not grads and not adds_to_partial:
            return
        cpu, comm, name = self.cpu, self.comm, self.name
        self._wait_for_post_backward()
        if adds_to_partial:  # which may be laid out anew, on that stream
            cpu.wait_stream(Lane.REDUCE_SCATTER, Lane.COMPUTE)
        n_bytes, reduce_dtype = self.layout.reduce_bytes, self.layout.reduce_dtype
        if self.layout.by_columns:  # one gradient after the other is laid out anew, in chunks for the ranks
            for n in grads.values():
                cpu.alloc(Memory.TEMPORARY, name, n, dtype)
                cpu.op(Op.RS_COPY_IN, name, Lane.COMPUTE, n, dtype, NOT_RECORDED)
                cpu.free(Memory.TEMPORARY, name, n, dtype)
        cpu.alloc(Memory.RS_INPUT, name, n_bytes, reduce_dtype)
        cpu.op(Op.RS_COPY_IN, name, Lane.COMPUTE, n_bytes, reduce_dtype)
        if grads:
            cpu.free(Memory.UNSHARDED_GRAD, name, sum(grads.values()), dtype, None, len(grads))
        grads.clear()
        cpu.wait_stream(Lane.REDUCE_SCATTER, Lane.COMPUTE)
        cpu.alloc(Memory.RS_OUTPUT, name, self._output_bytes, reduce_dtype)
        self._reduce_scatter()
        reduced = cpu.record(Lane.REDUCE_SCATTER)
        if self.mesh.replicas == 1:
            self._to_sharded(Lane.REDUCE_SCATTER)
        elif all_reduce:
            self._all_reduce()
            self._to_sharded(Lane.ALL_REDUCE)
        else:
            self._keep_partial()
        comm.reduce_scatter_states.append((self._free_input, reduced))

    def _wait_for_post_backward(self) -> None:
        """If an earlier backward was not the last, its reduction may still run."""
        for event in (self._post_reduce_event, self._all_reduce_event):
            if event:
                self.cpu.wait(Lane.COMPUTE, event)
        self._post_reduce_event = 0
        self._drop_all_reduce_state()

    def _drop_all_reduce_state(self) -> None:
        self._all_reduce_event = 0
        for detail in self._held:
            self._free_output(detail)
        self._held = ()

    def _free_input(self) -> None:
        self.cpu.free(Memory.RS_INPUT, self.name, self.layout.reduce_bytes, self.layout.reduce_dtype)

    def _free_output(self, detail: str = "") -> None:
        self.cpu.free(Memory.RS_OUTPUT, self.name, self._output_bytes, self.layout.reduce_dtype, None, 1, detail)

    def _reduce_scatter(self) -> None:
        cpu, mesh, layout, name, n_bytes = self.cpu, self.mesh, self.layout, self.name, self.layout.reduce_bytes
        self._divide(self.layout.division.before, n_bytes, Lane.REDUCE_SCATTER)
        if mesh.shards > 1:
            cpu.collective(
                Op.REDUCE_SCATTER, name, Lane.REDUCE_SCATTER, n_bytes, layout.reduce_dtype,
                layout.division.reduce_scatter_op, mesh.shards, self.comm.reduce_scatter_communicator + mesh.of, False,
                mesh.stride,
            )  # fmt: skip
            return
        factor = layout.division.given
        if factor is not None and not (factor == 1 and self.comm.torch_2_15):  # on the way from I to O
            cpu.op(Op.DIV, name, Lane.REDUCE_SCATTER, n_bytes, layout.reduce_dtype, f"by {factor}")
        cpu.op(Op.RS_COPY, name, Lane.REDUCE_SCATTER, n_bytes, layout.reduce_dtype)

    def _divide(self, factor: float | None, n_bytes: int, lane: Lane) -> None:
        if factor is not None and factor != 1:
            self.cpu.op(Op.DIV, self.name, lane, n_bytes, self.layout.reduce_dtype, f"by {factor}")

    def _keep_partial(self) -> None:
        """HSDP without all-reduce: sum what was reduce-scattered over micro-batches."""
        had_partial, self._partial = self._partial, True
        if had_partial:
            self.cpu.op(Op.ACCUMULATE, self.name, Lane.REDUCE_SCATTER, self._output_bytes, self.layout.reduce_dtype)
        self._reduced_on(Lane.REDUCE_SCATTER)
        if had_partial:
            self._free_output()

    def _all_reduce(self) -> None:
        cpu, dtype = self.cpu, self.layout.reduce_dtype
        if self._partial:
            cpu.op(Op.ACCUMULATE, self.name, Lane.REDUCE_SCATTER, self._output_bytes, dtype)
        cpu.wait_stream(Lane.ALL_REDUCE, Lane.REDUCE_SCATTER)
        cpu.collective(
            Op.ALL_REDUCE, self.name, Lane.ALL_REDUCE, self._output_bytes, dtype, self.layout.division.all_reduce_op,
            self.mesh.replicas, REPLICATE + self.mesh.of,
        )  # fmt: skip
        self._all_reduce_event = cpu.record(Lane.ALL_REDUCE)

    def _to_sharded(self, lane: Lane) -> None:
        """Divide, cast, and hand O out as sharded gradients, on the last stream used."""
        cpu, layout, name = self.cpu, self.layout, self.name
        held = bool(self._all_reduce_event)  # by the all-reduce state
        self._divide(self.layout.division.after, self._output_bytes, lane)
        cast = layout.reduce_dtype != layout.orig_dtype
        if cast:
            detail = f"{TORCH_DTYPES[layout.reduce_dtype]} -> {TORCH_DTYPES[layout.orig_dtype]}"
            cpu.alloc(Memory.RS_OUTPUT, name, self._sharded_bytes, layout.orig_dtype, lane)
            cpu.op(Op.GRAD_CAST, name, lane, self._sharded_bytes, layout.orig_dtype, detail)
            if held:
                self._held = ("",)
            elif not self.comm.torch_2_15:
                self._free_output()
        output_lane = lane if cast else Lane.REDUCE_SCATTER
        self._hand_out(lane)
        self._reduced_on(lane)
        if cast and not held and self.comm.torch_2_15:
            self._free_output()
        # O goes now if it was added to earlier gradients, or copied to the CPU (see `zero_grad`); else it stays
        detail = "" if self.has_sharded else NOT_RECORDED
        if not self.has_sharded:
            self._sharded_lane = output_lane
        if self.has_sharded or self.comm.cpu_offload:
            if held and not cast:
                self._held = (detail,)
            else:
                cpu.free(Memory.RS_OUTPUT, name, self._sharded_bytes, layout.orig_dtype, output_lane, 1, detail)
        if self._partial:
            self._free_output()
            self._partial = False
        self.has_sharded = True

    def _hand_out(self, lane: Lane) -> None:
        """Each parameter's gradient: to the CPU if offloaded, and added to the one that is there. The CPU adds what is
        offloaded, once it has waited for the copy, and issues nothing meanwhile.
        """
        cpu, layout, name = self.cpu, self.layout, self.name
        if not self.comm.cpu_offload and not self.has_sharded:
            return
        for k in layout.trained:
            if self.comm.cpu_offload:
                cpu.op(Op.D2H, name, lane, layout.shard_bytes[k], layout.orig_dtype)
                if self.has_sharded:
                    cpu.cpu_sync_stream(lane, NOT_RECORDED)
                    cpu.compute(Op.ACCUMULATE, name, layout.shard_bytes[k], layout.orig_dtype)
                else:
                    self._offload_events.append(cpu.record(lane))
            elif self.has_sharded:
                cpu.op(Op.ACCUMULATE, name, lane, layout.shard_bytes[k], layout.orig_dtype)

    def _reduced_on(self, lane: Lane) -> None:
        self._post_reduce_event = self.comm.last_post_reduce_events[lane] = self.cpu.record(lane)

    # -- the ends of backward and of the step

    def finalize(self) -> None:
        """End of the last backward: nothing of the reductions is pending any more."""
        self._post_reduce_event = 0
        self._drop_all_reduce_state()
        for event in self._offload_events:
            self.cpu.cpu_sync(event)
        self._offload_events.clear()

    def zero_grad(self) -> None:
        """Drop the sharded gradients (``optimizer.zero_grad(set_to_none=True)``).

        Offloaded ones are in the CPU's memory and free no bytes of the device. A recording on the CPU, where offloading
        copies nothing, has the line here.
        """
        if self.has_sharded:
            n_bytes = 0 if self.comm.cpu_offload else self._sharded_bytes
            self.cpu.free(Memory.RS_OUTPUT, self.name, n_bytes, self.layout.orig_dtype, self._sharded_lane)
            self.has_sharded = False
