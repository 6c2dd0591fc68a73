"""`ParamGroup`: one unit's parameters as a small machine that issues what torch issues.

Each method is named after the method of ``torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup``
(torch 2.13) whose instructions it emits, and branches on the same state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.unit import Param, Unit
from fsdp_sim.timeline import Lane, Memory, Op

SHARD_COMMUNICATOR = "shard"  # all-gather and reduce-scatter share it, so they run in issue order


class TrainingState(Enum):
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()
    IDLE = auto()


@dataclass(frozen=True)
class AllGatherResult:
    """A gather that was issued: its flat output G is alive until this is dropped."""

    group: ParamGroup
    event: int

    def drop(self) -> None:
        """Free G. At world size 1 there is none: parameters are copied straight from the shards."""
        group = self.group
        if group.world_size > 1:
            group.cpu.free(Memory.AG_OUTPUT, group.name, group.gather_bytes, group.gather_dtype)


@dataclass(frozen=True)
class ReduceScatterState:
    """A reduce-scatter that was issued: its input I is alive until this is dropped."""

    group: ParamGroup
    event: int
    bytes: int
    dtype: str

    def drop(self) -> None:
        self.group.cpu.free(Memory.RS_INPUT, self.group.name, self.bytes, self.dtype)


@dataclass
class CommContext:
    """What all groups under one root share (torch's ``FSDPCommContext``)."""

    all_gather_state: tuple[AllGatherResult, int] | None = None  # the previous group's G, and the end of its copy-out
    reduce_scatter_states: list[ReduceScatterState] = field(default_factory=list)
    reduce_scatter_max_input_buffers: int = 1
    post_forward_order: list[ParamGroup] = field(default_factory=list)
    last_post_reduce_events: dict[Lane, int] = field(default_factory=dict)


class ParamGroup:
    """The state of one unit's parameters and the hooks that move it."""

    def __init__(self, unit: Unit, cpu: Cpu, comm: CommContext, world_size: int, reshard_after_forward: bool) -> None:
        self.name = unit.name
        self.params = unit.params
        self.cpu = cpu
        self.comm = comm
        self.world_size = world_size
        self.reshard_after_forward = reshard_after_forward
        self.reduce_grads = True
        self.training_state = TrainingState.IDLE
        self.is_unsharded = False
        self.grads: dict[str, Param] = {}  # whole gradients that are alive
        self.sharded_grad: tuple[int, str] | None = None  # bytes and dtype of O, which the gradients are views of
        self._all_gather_result: AllGatherResult | None = None
        self._post_forward_indices: list[int] = []
        dtypes = {p.dtype for p in unit.params}
        self.gather_dtype = dtypes.pop() if len(dtypes) == 1 else "uint8"  # mixed dtypes are gathered as bytes
        self.gather_bytes = sum(p.padded_bytes(world_size) for p in unit.params)

    # -- unshard and reshard

    def unshard(self) -> None:
        """Issue the all-gather, unless one is pending or the parameters are whole."""
        cpu = self.cpu
        cpu.hook("unshard", self.name)
        if self._all_gather_result is not None or self.is_unsharded:
            return
        if self.world_size == 1:
            self._all_gather_result = AllGatherResult(self, cpu.record(Lane.COMPUTE))
            return
        cpu.alloc(Memory.AG_OUTPUT, self.name, self.gather_bytes, self.gather_dtype)
        cpu.op(Op.AG_COPY_IN, self.name, bytes=self.gather_bytes // self.world_size, dtype=self.gather_dtype)
        cpu.wait_stream(Lane.ALL_GATHER, Lane.AG_COPY_IN)
        self._collective(Op.ALL_GATHER, self.gather_bytes, self.gather_dtype)
        self._all_gather_result = AllGatherResult(self, cpu.record(Lane.ALL_GATHER))

    def wait_for_unshard(self) -> None:
        """Make compute wait for the all-gather and copy it out into the whole parameters."""
        cpu, result = self.cpu, self._all_gather_result
        cpu.hook("wait_for_unshard", self.name)
        if result is None:
            return
        previous = None
        in_forward = self.training_state is TrainingState.FORWARD
        if in_forward and self.comm.all_gather_state is not None:
            previous, copied_out = self.comm.all_gather_state
            self._all_gather_streams_wait(copied_out)
            self.comm.all_gather_state = None
        if self.world_size > 1:
            cpu.wait(Lane.COMPUTE, result.event)
        for param in self.params:
            cpu.alloc(Memory.UNSHARDED, self.name, param.padded_bytes(self.world_size), param.dtype)
        cpu.op(Op.AG_COPY_OUT, self.name, bytes=self.gather_bytes, dtype=self.gather_dtype)
        self.is_unsharded = True
        copied_out = cpu.record(Lane.COMPUTE)
        if in_forward and self.world_size > 1:
            # The next group waits for this copy-out and frees G: so the next all-gather need not wait for it.
            self.comm.all_gather_state = (result, copied_out)
        else:
            self._all_gather_streams_wait(copied_out)
            result.drop()
        self._all_gather_result = None
        if previous is not None:
            previous.drop()

    def reshard(self) -> None:
        """Free the whole parameters."""
        self.cpu.hook("reshard", self.name)
        if self.training_state is TrainingState.FORWARD and not self.reshard_after_forward:
            return
        if self.is_unsharded:
            for param in self.params:
                self.cpu.free(Memory.UNSHARDED, self.name, param.padded_bytes(self.world_size), param.dtype)
            self.is_unsharded = False

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
        self.comm.post_forward_order.append(self)
        self.training_state = TrainingState.IDLE

    def pre_backward(self, default_prefetch: bool) -> None:
        self.cpu.hook("pre_backward", self.name)
        self.training_state = TrainingState.PRE_BACKWARD
        self.unshard()
        self.wait_for_unshard()
        if default_prefetch:
            index = self._post_forward_indices.pop()
            if index > 0:
                self.comm.post_forward_order[index - 1].unshard()

    def accumulate_grads(self, params: tuple[Param, ...]) -> None:
        """Autograd writes whole gradients; those left by an earlier micro-batch are added to in place."""
        for param in params:
            if param.requires_grad and param.name not in self.grads:
                self.cpu.alloc(Memory.UNSHARDED_GRAD, self.name, param.bytes, param.dtype)
                self.grads[param.name] = param

    def post_backward(self) -> None:
        """Reshard, then reduce-scatter the gradients."""
        cpu, comm = self.cpu, self.comm
        cpu.hook("post_backward", self.name)
        self.training_state = TrainingState.POST_BACKWARD
        self.reshard()
        if not self.reduce_grads:
            return
        while len(comm.reduce_scatter_states) >= comm.reduce_scatter_max_input_buffers:
            oldest = comm.reduce_scatter_states.pop(0)
            cpu.wait(Lane.COMPUTE, oldest.event)
            oldest.drop()
        if self.grads:
            self._foreach_reduce()

    def _foreach_reduce(self) -> None:
        cpu, n = self.cpu, self.world_size
        dtype = next(iter(self.grads.values())).dtype
        n_bytes = sum(p.padded_bytes(n) for p in self.grads.values())
        cpu.alloc(Memory.RS_INPUT, self.name, n_bytes, dtype)
        cpu.op(Op.RS_COPY_IN, self.name, bytes=n_bytes, dtype=dtype)
        for param in self.grads.values():
            cpu.free(Memory.UNSHARDED_GRAD, self.name, param.bytes, param.dtype)
        self.grads.clear()
        cpu.wait_stream(Lane.REDUCE_SCATTER, Lane.COMPUTE)
        cpu.alloc(Memory.RS_OUTPUT, self.name, n_bytes // n, dtype)
        if n > 1:
            self._collective(Op.REDUCE_SCATTER, n_bytes, dtype, reduce_op="AVG")
        reduced = cpu.record(Lane.REDUCE_SCATTER)
        self.comm.last_post_reduce_events[Lane.REDUCE_SCATTER] = cpu.record(Lane.REDUCE_SCATTER)
        if self.sharded_grad is None:
            self.sharded_grad = (n_bytes // n, dtype)
        else:  # it was added to the gradient of an earlier micro-batch
            cpu.free(Memory.RS_OUTPUT, self.name, n_bytes // n, dtype)
        self.comm.reduce_scatter_states.append(ReduceScatterState(self, reduced, n_bytes, dtype))

    def finalize_backward(self) -> None:
        """Make compute wait for what was reduced, and drop a gather that was prefetched and never used."""
        self.cpu.hook("finalize_backward", self.name)
        for event in self.comm.last_post_reduce_events.values():
            self.cpu.wait(Lane.COMPUTE, event)
        self.comm.last_post_reduce_events.clear()
        if self._all_gather_result is not None:
            self.cpu.wait(Lane.COMPUTE, self._all_gather_result.event)
            self._all_gather_result.drop()
            self._all_gather_result = None
        self._post_forward_indices.clear()

    def zero_grad(self) -> None:
        """Drop the sharded gradients (``optimizer.zero_grad(set_to_none=True)``)."""
        if self.sharded_grad is not None:
            self.cpu.free(Memory.RS_OUTPUT, self.name, *self.sharded_grad)
            self.sharded_grad = None

    def _collective(self, op: Op, n_bytes: int, dtype: str, reduce_op: str = "") -> None:
        self.cpu.op(
            op, self.name, bytes=n_bytes, dtype=dtype, reduce_op=reduce_op,
            group_size=self.world_size, communicator=SHARD_COMMUNICATOR,
        )  # fmt: skip

    def _all_gather_streams_wait(self, event: int) -> None:
        self.cpu.wait(Lane.AG_COPY_IN, event)
        self.cpu.wait(Lane.ALL_GATHER, event)
