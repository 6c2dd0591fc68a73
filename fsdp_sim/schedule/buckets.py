"""Gradients communicated while backward runs: what DDP and ZeRO share.

A bucket is one flat buffer of gradients, filled in the order in which backward makes them: from the last parameter to
the first. Its collective is issued when its last gradient is there and the bucket before it has been issued, and runs
beside the rest of backward; compute waits for all of them at the end. `fsdp_sim.mini.siblings.buckets` can be run.

[Note: the first step]  torch has all gradients in one bucket in its first backward, and makes the buckets after it, in
the order in which gradients came. A program here has in every step what torch has from the second on.

[Note: gradients are views]  Gradients live in the buckets (``gradient_as_bucket_view=True``, as in the mini), which are
never freed. Autograd's own gradient of a parameter is copied in and dropped. With torch's default, where a gradient and
its bucket are two, they take twice the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.unit import Param, Unit
from fsdp_sim.spec import DTYPE_BYTES, TORCH_DTYPES, Plan
from fsdp_sim.timeline import Lane, Memory, Op

MIB = 2**20
DEFAULT_CAP_MB = 25.0  # torch: where nobody asks for a size, the first bucket is smaller
FIRST_CAP_BYTES = MIB  # torch: dist._DEFAULT_FIRST_BUCKET_BYTES
GRAD = Memory.UNSHARDED_GRAD


def assign_to_buckets(sizes: Sequence[tuple[int, str]], cap: int, first_cap: int | None = None) -> list[list[int]]:
    """Which gradients share a bucket. A bucket is full once it holds ``cap`` bytes or more, and has one dtype.

    Args:
        sizes: bytes and dtype of each gradient, in the order in which they come.
        first_cap: of the first bucket of each dtype, if it is another.

    Returns:
        for each bucket the places of its gradients in ``sizes``. (torch: ``compute_bucket_assignment_by_size``.)

    Example:
        >>> assign_to_buckets([(16, "fp32"), (12, "fp32"), (8, "fp32"), (4, "fp32")], 20, first_cap=16)
        [[0], [1, 2], [3]]
    """
    full: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    caps: dict[str, int] = {}
    for place, (n_bytes, dtype) in enumerate(sizes):
        filling.setdefault(dtype, []).append(place)
        filled[dtype] = filled.get(dtype, 0) + n_bytes
        if filled[dtype] >= caps.setdefault(dtype, first_cap or cap):
            full.append(filling.pop(dtype))
            filled[dtype], caps[dtype] = 0, cap
    return full + list(filling.values())


@dataclass
class Bucket:
    """Gradients that are communicated together.

    Attributes:
        name: ``bucket.0`` is the first to be full.
        numel: elements, padded to equal parts for the ranks that share it.
        dtype: it is reduced in; ``param_dtype`` that of the parameters.
        parts: elements that become ready with the backward of each segment.
        missing: segments whose backward is still to come.
        event: the end of its collective; 0 where there was none.
        accumulated: has gradients of an earlier micro-batch.
        pending: has been issued, and not been finished.
    """

    name: str
    numel: int
    dtype: str
    param_dtype: str
    parts: dict[str, int]
    missing: set[str] = field(default_factory=set)
    event: int = 0
    accumulated: bool = False
    pending: bool = False

    @property
    def bytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def casts(self) -> bool:
        """Reduced gradients are cast back."""
        return self.dtype != self.param_dtype


def buckets_of(walk: Sequence[tuple[Unit, str]], plan: Plan, world_size: int) -> list[Bucket]:
    """The buckets in the order in which they are issued; those of ZeRO are padded to equal parts for all ranks.

    Args:
        walk: unit and segment of each piece of compute, in forward order; parameters are taken to be registered so.
    """
    ddp = plan.api == "ddp"
    first_cap = FIRST_CAP_BYTES if ddp and plan.bucket_cap_mb is None else None
    ranks = 1 if ddp else world_size
    params: list[tuple[str, Param]] = []  # a gradient is ready after the backward of the first segment that uses it
    for unit, segment in walk:
        params += [(segment, p) for p in unit.params if p.requires_grad and unit.segments_of(p)[0] == segment]
    params.reverse()
    dtypes = [plan.reduce_dtype or plan.param_dtype or p.dtype for _, p in params]
    numels = [math.prod(p.shape) for _, p in params]
    sizes = [(n * DTYPE_BYTES[plan.param_dtype or p.dtype], p.dtype) for n, (_, p) in zip(numels, params, strict=True)]
    buckets: list[Bucket] = []
    for places in assign_to_buckets(sizes, int((plan.bucket_cap_mb or DEFAULT_CAP_MB) * MIB), first_cap):
        parts: dict[str, int] = {}
        for place in places:
            parts[params[place][0]] = parts.get(params[place][0], 0) + numels[place]
        numel = -(-sum(parts.values()) // ranks) * ranks
        first = places[0]
        buckets.append(Bucket(f"bucket.{len(buckets)}", numel, dtypes[first], params[first][1].dtype, parts))
    return buckets


class Reducer:
    """Averages the gradients over the ranks during backward (torch: ``reducer.cpp``).

    Attributes:
        communicator: of its collectives.
        in_place: gradients of several micro-batches are added up in the buckets.
        next: the bucket that is issued next.
    """

    communicator = "replicate"
    in_place = True

    def __init__(self, cpu: Cpu, walk: Sequence[tuple[Unit, str]], plan: Plan, world_size: int) -> None:
        self.cpu, self.world_size = cpu, world_size
        self.buckets = buckets_of(walk, plan, world_size)
        self.of_segment: dict[str, list[Bucket]] = {}
        for bucket in self.buckets:
            for segment in bucket.parts:
                self.of_segment.setdefault(segment, []).append(bucket)
        self.next = 0
        self.open()

    # What happens to a bucket. ZeRO-2 does it otherwise

    def open(self) -> None:
        for bucket in self.buckets:
            self.cpu.alloc(GRAD, bucket.name, bucket.bytes, bucket.dtype)

    def need(self, bucket: Bucket) -> None:
        """A gradient of this bucket is about to be computed."""

    def issue(self, bucket: Bucket) -> None:
        self.after_compute(Lane.ALL_REDUCE)
        bucket.event = self.collective(Op.ALL_REDUCE, Lane.ALL_REDUCE, bucket.name, bucket.bytes, bucket.dtype, "AVG")

    def finish(self, bucket: Bucket) -> None:
        """Compute waits until it is averaged."""
        self.wait(bucket)
        if bucket.casts:
            self.cast_back(bucket, bucket.numel, GRAD)
        bucket.accumulated = True

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            if bucket.casts:
                n_bytes = bucket.numel * DTYPE_BYTES[bucket.param_dtype]
                self.cpu.free(GRAD, bucket.name, n_bytes, bucket.param_dtype)
            bucket.accumulated = False

    def close(self) -> None:
        """The end of training."""
        for bucket in self.buckets:
            self.cpu.free(GRAD, bucket.name, bucket.bytes, bucket.dtype)

    # A backward

    def before(self, segment: str) -> None:
        for bucket in self.of_segment.get(segment, ()):
            self.need(bucket)

    def after(self, segment: str) -> None:
        """The gradients of a segment are there: copy them in, issue what is full."""
        for bucket in self.of_segment.get(segment, ()):
            op = Op.ACCUMULATE if bucket.accumulated and self.in_place and not bucket.casts else Op.RS_COPY_IN
            self.cpu.op(op, bucket.name, Lane.COMPUTE, bucket.parts[segment] * DTYPE_BYTES[bucket.dtype], bucket.dtype)
            bucket.missing.discard(segment)
        while self.next < len(self.buckets) and not self.buckets[self.next].missing:
            self.issue(self.buckets[self.next])
            self.next += 1

    def begin_backward(self) -> None:
        self.next = 0
        for bucket in self.buckets:
            bucket.missing = set(bucket.parts)

    def end_backward(self) -> None:
        for bucket in self.buckets:
            self.finish(bucket)

    def collective(self, op: Op, lane: Lane, name: str, n_bytes: int, dtype: str, reduce_op: str = "") -> int:
        """Returns the event at its end. One rank has no collectives."""
        if self.world_size == 1:
            return 0
        self.cpu.collective(op, name, lane, n_bytes, dtype, reduce_op, self.world_size, self.communicator)
        return self.cpu.record(lane)

    def after_compute(self, lane: Lane) -> None:
        if self.world_size > 1:
            self.cpu.wait_stream(lane, Lane.COMPUTE)

    def wait(self, bucket: Bucket) -> None:
        if bucket.event:
            self.cpu.wait(Lane.COMPUTE, bucket.event)
            bucket.event = 0

    def cast_back(self, bucket: Bucket, numel: int, category: Memory) -> None:
        """Reduced gradients to the parameters' dtype, added to those of earlier micro-batches."""
        cpu, dtype = self.cpu, bucket.param_dtype
        n_bytes = numel * DTYPE_BYTES[dtype]
        cpu.alloc(category, bucket.name, n_bytes, dtype)
        detail = f"{TORCH_DTYPES[bucket.dtype]} -> {TORCH_DTYPES[dtype]}"
        cpu.op(Op.GRAD_CAST, bucket.name, Lane.COMPUTE, n_bytes, dtype, detail)
        if bucket.accumulated:
            cpu.op(Op.ACCUMULATE, bucket.name, Lane.COMPUTE, n_bytes, dtype)
            cpu.free(category, bucket.name, n_bytes, dtype)
