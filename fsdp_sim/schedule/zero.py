"""`build_zero`: the programs of ZeRO-1 and ZeRO-2: whole parameters on every rank, the optimizer's work split.

Each bucket of gradients (see `buckets`) is cut into equal parts, one per rank.

    zero1   backward: ALL_REDUCE, as in DDP. Step: each rank its own part. Then ALL_GATHER of the parameters.
    zero2   backward: REDUCE_SCATTER, after which the bucket's memory goes. Step and ALL_GATHER the same.

All collectives share one communicator. The programs are those that `fsdp_sim.mini.siblings.zero` issues, in its order.
(DeepSpeed's stage 1 reduce-scatters too, and differs from stage 2 in memory alone.)
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_sim.schedule.buckets import GRAD, Bucket, Reducer
from fsdp_sim.schedule.ddp import Trainer
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import DTYPE_BYTES, Plan
from fsdp_sim.timeline import Lane, Memory, Op


def build_zero(units: Sequence[Unit], plan: Plan, world_size: int, steps: int = 1) -> Program:
    """The program of ZeRO stage 1 or 2, as ``plan.api`` says.

    Raises:
        ValueError: the plan never reduces gradients.
    """
    trainer = ZeroTrainer(units, plan, world_size, ShardReducer if plan.api == "zero2" else WholeReducer)
    for step in range(steps):
        trainer.train_step(step)
    trainer.reducer.close()
    return Program(tuple(units), plan, world_size, tuple(trainer.cpu.instructions))


class ZeroTrainer(Trainer):
    """After each rank has stepped its part of every bucket, all gather the parameters."""

    def optimizer(self) -> None:
        super().optimizer()
        reducer = self.reducer
        reducer.after_compute(Lane.ALL_GATHER)
        for bucket in reducer.buckets:
            n_bytes = bucket.numel * DTYPE_BYTES[bucket.param_dtype]
            bucket.event = reducer.collective(Op.ALL_GATHER, Lane.ALL_GATHER, bucket.name, n_bytes, bucket.param_dtype)
        for bucket in reducer.buckets:
            reducer.wait(bucket)


class WholeReducer(Reducer):
    """Stage 1: gradients are averaged whole."""

    communicator = "shard"


class ShardReducer(WholeReducer):
    """Stage 2: a bucket has memory from its first gradient until it is reduced, and two buckets at most have."""

    in_place = False

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def need(self, bucket: Bucket) -> None:
        if len(bucket.missing) == len(bucket.parts):
            self.cpu.alloc(GRAD, bucket.name, bucket.bytes, bucket.dtype)

    def issue(self, bucket: Bucket) -> None:
        self.after_compute(Lane.REDUCE_SCATTER)
        self.cpu.alloc(Memory.RS_OUTPUT, bucket.name, bucket.bytes // self.world_size, bucket.dtype)
        if self.next > 0:
            self.finish(self.buckets[self.next - 1])
        bucket.event = self.collective(
            Op.REDUCE_SCATTER, Lane.REDUCE_SCATTER, bucket.name, bucket.bytes, bucket.dtype, "AVG"
        )
        bucket.pending = True

    def finish(self, bucket: Bucket) -> None:
        """Wait for this rank's part of the mean, add it to that of earlier micro-batches, free the bucket."""
        if not bucket.pending:
            return
        cpu, part = self.cpu, bucket.numel // self.world_size
        part_bytes = part * DTYPE_BYTES[bucket.dtype]
        self.wait(bucket)
        if self.world_size == 1:
            cpu.op(Op.RS_COPY, bucket.name, Lane.COMPUTE, bucket.bytes, bucket.dtype)
        if bucket.casts:
            self.cast_back(bucket, part, Memory.RS_OUTPUT)
        elif bucket.accumulated:
            cpu.op(Op.ACCUMULATE, bucket.name, Lane.COMPUTE, part_bytes, bucket.dtype)
        if bucket.casts or bucket.accumulated:
            cpu.free(Memory.RS_OUTPUT, bucket.name, part_bytes, bucket.dtype)
        cpu.free(GRAD, bucket.name, bucket.bytes, bucket.dtype)
        bucket.accumulated, bucket.pending = True, False

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            n_bytes = bucket.numel // self.world_size * DTYPE_BYTES[bucket.param_dtype]
            self.cpu.free(Memory.RS_OUTPUT, bucket.name, n_bytes, bucket.param_dtype)
            bucket.accumulated = False
