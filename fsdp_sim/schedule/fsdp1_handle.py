"""`FlatParamHandle`: the parameters of one FSDP1 unit as one flat parameter, and what is issued when it moves.

FSDP1 lays the parameters of a unit end to end, pads them to a multiple of the ranks, and gives each rank one piece:

    parameters      | a a a b | b b b . |      two ranks: the cut goes through b
    gathered        straight into the flat parameter, of which a and b are views: nothing to copy out
    gradient        autograd concatenates those of a and b; the reduce-scatter reads it where it lies

Methods are named after those of torch 2.13: of ``FlatParamHandle`` in ``torch.distributed.fsdp._flat_param``, and of
the functions of ``_runtime_utils`` that reduce the gradient.

[Note: record_stream]  Memory is allocated on one stream and last used on another. FSDP1 does not wait for that: it
frees at once and tells the allocator with ``record_stream`` to give the memory away only when the other stream has come
that far. In a program that is a FREE followed by a RECORD_STREAM; one that follows no FREE of its buffer keeps nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp_sim.schedule.fsdp1_context import AR, MAX_UNFREED, REPLICATE, SHARD, B, C, FSDP1Context, P, U
from fsdp_sim.schedule.lines import NOT_RECORDED
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import DTYPE_BYTES, TORCH_DTYPES
from fsdp_sim.timeline import Lane, Memory, Op

UNSHARDED, GRAD, RS_INPUT, RS_OUTPUT = Memory.UNSHARDED, Memory.UNSHARDED_GRAD, Memory.RS_INPUT, Memory.RS_OUTPUT


@dataclass
class Buffer:
    """Memory that is alive: of which category, how much, from which stream's pool."""

    category: Memory
    bytes: int
    dtype: str
    lane: Lane


class FlatParamHandle:
    """One unit's flat parameter.

    Attributes:
        inside: it is of units inside the one whose name it has, so that its hooks run within that one's compute.
        unsharded: the flat parameter has memory.
        sharded_data: the module's parameters are the shard. Those kept after forward have memory all the same.
        skipped_views: with ``use_orig_params``, parameters kept after forward are not exchanged for the shard.
        shard_copy: the shard in ``param_dtype``, or on the device, while it is needed.
        grad: the unsharded gradient in ``.grad``.
        grad_shard: the reduced gradient of earlier micro-batches.
    """

    def __init__(self, unit: Unit, context: FSDP1Context, *, inside: bool = False) -> None:
        self.inside = inside
        plan, n, self.dtype = context.plan, context.shard_size if context.sharded else 1, unit.params[0].dtype
        self.name, self.context, self.cpu = unit.name, context, context.cpu
        self.param_dtype = plan.param_dtype or self.dtype
        self.reduce_dtype = plan.reduce_dtype or self.param_dtype
        self.casts, self.offloads = self.param_dtype != self.dtype, plan.cpu_offload
        self.requires_grad = any(p.requires_grad for p in unit.params)
        self.grad_bytes: dict[str, int] = {}  # by the segment that computes the first gradient
        used: set[str] = set()
        self.numel, param_size = 0, DTYPE_BYTES[self.param_dtype]
        for p in unit.params:
            users, numel = unit.segments_of(p), math.prod(p.shape)
            self.numel += numel
            self.grad_bytes[users[-1]] = self.grad_bytes.get(users[-1], 0) + numel * param_size
            used.update(users)
        self.segments = used
        self.first_segment = next(s for s in unit.names_of_segments if s in used)
        self.shard_numel = -(-self.numel // n)
        self.padded_numel = self.shard_numel * n
        self.unsharded = self.skipped_views = False
        self.sharded_data = True
        self.shard_copy: Buffer | None = None
        self.grad: Buffer | None = None
        self.grad_shard: Buffer | None = None
        self.pieces: list[Buffer] = []  # gradients of single parameters, until autograd has all
        # Of prefetching
        self.needs_pre_forward_unshard = self.needs_pre_backward_unshard = self.prefetched = False
        self.pre_forward_index: int | None = None
        self.post_forward_index: int | None = None

    def alloc(self, category: Memory, numel: int, dtype: str, lane: Lane, detail: str = NOT_RECORDED) -> Buffer:
        buffer = Buffer(category, numel * DTYPE_BYTES[dtype], dtype, lane)
        self.cpu.alloc(category, self.name, buffer.bytes, dtype, lane, 1, detail)
        return buffer

    def free(self, buffer: Buffer, detail: str = NOT_RECORDED) -> None:
        self.cpu.free(buffer.category, self.name, buffer.bytes, buffer.dtype, buffer.lane, 1, detail)

    # Parameters

    def unshard(self) -> None:
        """Get the shard ready, let the rate limiter block the CPU, gather. The limiter blocks also for no gather."""
        cpu, context = self.cpu, self.context
        cpu.hook("unshard", self.name)
        self.pre_unshard()
        if context.plan.limit_all_gathers and len(context.free_events) >= MAX_UNFREED:
            cpu.cpu_block(context.free_events.popleft())
        if context.sharded:
            if not self.unsharded:
                flat = self.alloc(UNSHARDED, self.padded_numel, self.param_dtype, U, "")
                cpu.collective(Op.ALL_GATHER, self.name, U, flat.bytes, self.param_dtype, "", context.shard_size, SHARD)
                self.unsharded = True
                if self.offloads:
                    self._drop_shard_copy(U, free=not self.casts)
            if self.casts:
                self._drop_shard_copy(U)
            elif self.shard_copy:  # copied from the CPU, though the parameters were there
                self.free(self.shard_copy)
                self.shard_copy = None
        self.sharded_data = not (context.sharded or self.casts)

    def pre_unshard(self) -> None:
        """The shard as it is gathered: in ``param_dtype``, on the device."""
        if self.context.sharded and self.unsharded and not self.offloads:
            return
        cpu, category = self.cpu, Memory.TEMPORARY if self.context.sharded else UNSHARDED
        if self.casts:
            self.shard_copy = self.shard_copy or self.alloc(category, self.shard_numel, self.param_dtype, P)
            source = None
            if self.offloads:
                source = self.alloc(Memory.TEMPORARY, self.shard_numel, self.dtype, P)
                cpu.op(Op.H2D, self.name, P, source.bytes, self.dtype, NOT_RECORDED)
            to = f"to {TORCH_DTYPES[self.param_dtype]}"
            cpu.op(Op.AG_CAST, self.name, P, self.shard_copy.bytes, self.param_dtype, to)
            if source:
                self.free(source)
            cpu.wait_stream(U, P)
        elif self.offloads and self.sharded_data:
            self.shard_copy = self.shard_copy or self.alloc(category, self.shard_numel, self.dtype, P)
            cpu.op(Op.H2D, self.name, P, self.shard_copy.bytes, self.dtype, NOT_RECORDED)
            cpu.wait_stream(U, P)
            self._not_recorded()  # a recording on the CPU has its shards there already

    def reshard(self, *, free: bool, in_forward: bool = False) -> None:
        """Show the module its shard; free the flat parameter if asked to."""
        cpu, context = self.cpu, self.context
        cpu.hook("reshard", self.name)
        self.sharded_data, self.skipped_views = True, in_forward and context.skips_views
        if free:
            if self.unsharded:
                flat_bytes = self.padded_numel * DTYPE_BYTES[self.param_dtype]
                cpu.free(UNSHARDED, self.name, flat_bytes, self.param_dtype, U)
                self.unsharded = False
            cpu.record_stream(UNSHARDED, self.name, C)
            if context.plan.limit_all_gathers:
                context.free_events.append(cpu.record(C))
        if not context.sharded and (self.casts or self.shard_copy):
            self._drop_shard_copy(C)
        self.prefetched = False

    def _drop_shard_copy(self, until: Lane, *, free: bool = True) -> None:
        """``until``: the stream that has read it."""
        category = Memory.TEMPORARY if self.context.sharded else UNSHARDED
        if free and self.shard_copy:
            self.free(self.shard_copy)
            self.shard_copy = None
        self.cpu.record_stream(category, self.name, until)
        if not (self.casts or self.context.sharded):
            self._not_recorded()

    def _not_recorded(self) -> None:
        """The instruction before has no line in a recording."""
        instructions = self.cpu.instructions
        instructions[-1] = instructions[-1]._replace(detail=NOT_RECORDED)

    # Gradients

    def alloc_grads(self, segment: str) -> None:
        """Autograd is about to compute gradients of parameters that this segment uses."""
        if self.requires_grad and self.grad_bytes.get(segment):
            numel = self.grad_bytes[segment] // DTYPE_BYTES[self.param_dtype]
            self.pieces.append(self.alloc(GRAD, numel, self.param_dtype, C))

    def accumulate_grad(self) -> None:
        """Autograd concatenates the gradients of the parameters, and adds what ``.grad`` has already."""
        flat = self.alloc(GRAD, self.numel, self.param_dtype, C)
        self.cpu.op(Op.RS_COPY_IN, self.name, C, flat.bytes, self.param_dtype, NOT_RECORDED)
        for piece in self.pieces:
            self.free(piece)
        self.pieces.clear()
        if self.grad is None:
            self.grad = flat
        else:
            self.cpu.op(Op.ACCUMULATE, self.name, C, self.grad.bytes, self.grad.dtype, NOT_RECORDED)
            self.free(flat)

    def reduce_grad(self) -> None:
        """On the post-backward stream, which compute never waits for before the end of backward."""
        cpu, computed = self.cpu, self.grad
        assert computed is not None
        cpu.wait_stream(B, C)
        grad, category = computed, RS_INPUT if self.context.sharded else GRAD
        if computed.dtype != self.reduce_dtype:
            grad = self.alloc(category, self.numel, self.reduce_dtype, B)
            self._cast(B, grad.bytes, computed.dtype, self.reduce_dtype)
        if self.context.sharded:
            self._reduce_scatter(grad)
            self.grad = None
            if grad is not computed:
                self.free(grad)
        else:
            self.grad = self._all_reduce(grad, computed)
        if self.grad is not computed:
            self.free(computed)
        cpu.record_stream(GRAD, self.name, B)

    def _reduce_scatter(self, grad: Buffer) -> None:
        cpu, context, dtype = self.cpu, self.context, self.reduce_dtype
        padded = grad
        if self.padded_numel > self.numel:
            padded = self.alloc(RS_INPUT, self.padded_numel, dtype, B)
            cpu.op(Op.RS_COPY_IN, self.name, B, padded.bytes, dtype, NOT_RECORDED)
        mean = self.alloc(RS_OUTPUT, self.shard_numel, dtype, B)
        self._divide(B, padded.bytes, context.predivide)
        cpu.collective(Op.REDUCE_SCATTER, self.name, B, padded.bytes, dtype, "SUM", context.shard_size, SHARD)
        lane = B
        if context.hybrid:
            lane = AR
            cpu.wait_stream(AR, B)
            cpu.record_stream(RS_OUTPUT, self.name, AR)
            cpu.collective(Op.ALL_REDUCE, self.name, AR, mean.bytes, dtype, "SUM", context.replicas, REPLICATE)
        self._divide(lane, mean.bytes, context.postdivide)
        if dtype != self.dtype:
            low_precision, mean = mean, self.alloc(RS_OUTPUT, self.shard_numel, self.dtype, lane)
            self._cast(lane, mean.bytes, dtype, self.dtype)
            self.free(low_precision)
            cpu.record_stream(RS_OUTPUT, self.name, lane)
        if self.grad_shard is None:
            self.grad_shard = mean
        else:
            cpu.op(Op.ACCUMULATE, self.name, lane, mean.bytes, self.dtype)
            self.free(mean)
            if mean.lane is not lane:
                cpu.record_stream(RS_OUTPUT, self.name, lane)
                self._not_recorded()  # it was, above: the allocator remembers the stream until the memory is freed
        self._offload(lane, mean)
        if padded is not grad:
            self.free(padded)

    def _all_reduce(self, grad: Buffer, computed: Buffer) -> Buffer:
        """Of a flat parameter that is not sharded, in place; returns the gradient that ``.grad`` then is."""
        cpu, context = self.cpu, self.context
        self._divide(B, grad.bytes, context.predivide)
        cpu.collective(
            Op.ALL_REDUCE, self.name, B, grad.bytes, grad.dtype, "SUM", context.shard_size * context.replicas, REPLICATE
        )
        self._divide(B, grad.bytes, context.postdivide)
        if grad.dtype != self.dtype:
            low_precision, grad = grad, self.alloc(GRAD, self.numel, self.dtype, B)
            self._cast(B, grad.bytes, low_precision.dtype, self.dtype)
            if low_precision is not computed:
                self.free(low_precision)
            cpu.record_stream(GRAD, self.name, B)
        self._offload(B, grad)
        return grad

    def _divide(self, lane: Lane, n_bytes: int, factor: float) -> None:
        if factor > 1:
            self.cpu.op(Op.DIV, self.name, lane, n_bytes, self.reduce_dtype, f"by {factor}")

    def _cast(self, lane: Lane, n_bytes: int, dtype: str, to: str) -> None:
        self.cpu.op(Op.GRAD_CAST, self.name, lane, n_bytes, to, f"{TORCH_DTYPES[dtype]} -> {TORCH_DTYPES[to]}")

    def _offload(self, lane: Lane, grad: Buffer) -> None:
        if self.offloads:
            self.cpu.op(Op.D2H, self.name, lane, grad.bytes, grad.dtype, NOT_RECORDED)
            self.cpu.record_stream(grad.category, self.name, B)

    def free_grads(self) -> None:
        """``zero_grad``; where gradients are offloaded, the end of backward."""
        for grad in (self.grad, self.grad_shard):
            if grad is not None:
                self.free(grad)
        self.grad = self.grad_shard = None
