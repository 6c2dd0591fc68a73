"""`build_ddp`: the program of ``DistributedDataParallel``: every rank has the whole model, gradients are averaged.

See `buckets` for how gradients travel. `fsdp_sim.mini.siblings.ddp` is a DDP that can be run.

[Note: mixed precision]  With ``param_dtype`` a unit's parameters are cast before its forward and the copy is kept for
backward; gradients are in ``param_dtype``, reduced in ``reduce_dtype``, and cast back to the parameters' dtype.

[Note: one rank]  Nobody wraps the model of one process in DDP (Accelerate's `prepare_model` does so for several).
Gradients are then the parameters' own: backward makes them, ``zero_grad`` frees them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fsdp_sim.schedule.buckets import GRAD, Reducer
from fsdp_sim.schedule.checkpointing import checkpoints
from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.optimizer import optimizer_step
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.tree import walk_of
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import DTYPE_BYTES, TORCH_DTYPES, Plan
from fsdp_sim.timeline import Lane, Memory, Op, Phase


def build_ddp(units: Sequence[Unit], plan: Plan, world_size: int, steps: int = 1) -> Program:
    """The program torch's ``DistributedDataParallel`` issues around the whole model; units only name compute.

    Source: torch 2.13, ``torch.nn.parallel.distributed`` and ``reducer.cpp``.

    Raises:
        ValueError: the plan never reduces gradients.
    """
    trainer = Trainer(units, plan, world_size, Reducer)
    for step in range(steps):
        trainer.train_step(step)
    trainer.reducer.close()
    return Program(tuple(units), plan, world_size, tuple(trainer.cpu.instructions))


class Trainer:
    """The training loop of a model whose parameters are whole on every rank."""

    def __init__(self, units: Sequence[Unit], plan: Plan, world_size: int, reducer: type[Reducer]) -> None:
        _validate(plan)
        self.cpu, self.plan, self.units = Cpu(), plan, units
        self.alone = plan.api == "ddp" and world_size == 1  # see [Note: one rank]
        walk = walk_of(units)
        self.forwards = [segment for _, segment in walk]
        self.backwards: list[tuple[str, Unit]] = []
        for unit, segment in walk:
            if self.backwards or unit.trains(segment):
                self.backwards.append((segment, unit))
        self.backwards.reverse()
        self.block_of = checkpoints(units, plan)
        # Casts of parameters, by the segment that they precede: unit, bytes
        self.casts: dict[str, tuple[str, int]] = {}
        for unit in units:
            n = sum(math.prod(p.shape) for p in unit.params if p.dtype != (plan.param_dtype or p.dtype))
            if n and plan.param_dtype:
                self.casts[unit.names_of_segments[0]] = (unit.name, n * DTYPE_BYTES[plan.param_dtype])
        # Bytes of the gradients of each segment: of all its parameters, and of the largest
        self.grads: dict[str, tuple[int, int]] = {}
        for unit, segment in walk:
            new = [
                math.prod(p.shape) * DTYPE_BYTES[p.dtype if self.alone else plan.param_dtype or p.dtype]
                for p in unit.params
                if p.requires_grad and unit.segments_of(p)[0] == segment
            ]
            if new:
                self.grads[segment] = (sum(new), max(new))
        # Gradients outside of the buckets, by segment: unit, bytes, dtype
        self.kept: dict[str, tuple[str, int, str]] = {}
        self.reducer = reducer(self.cpu, () if self.alone else walk, plan, world_size)

    def train_step(self, step: int) -> None:
        last = self.plan.grad_accum - 1
        self.cpu.step = step
        for micro_batch in range(self.plan.grad_accum):
            self.cpu.micro_batch = micro_batch
            self.forward()
            syncs = self.plan.requires_gradient_sync is True or micro_batch == last
            self.backward(sync=syncs and not self.alone)
        self.cpu.phase = Phase.OPTIMIZER
        self.optimizer()
        self.reducer.zero_grad()
        while self.alone and self.kept:
            self.cpu.free(GRAD, *self.kept.pop(next(iter(self.kept))))

    def optimizer(self) -> None:
        optimizer_step(self.cpu, self.units, self.plan, 1)

    def forward(self) -> None:
        cpu, dtype = self.cpu, self.plan.param_dtype or ""
        cpu.phase = Phase.FORWARD
        for segment in self.forwards:
            if segment in self.casts:
                unit, n_bytes = self.casts[segment]
                cpu.alloc(Memory.UNSHARDED, unit, n_bytes, dtype)
                cpu.op(Op.AG_CAST, unit, Lane.COMPUTE, n_bytes, dtype, f"to {TORCH_DTYPES[dtype]}")
            cpu.op(Op.FWD, segment)

    def backward(self, sync: bool) -> None:
        cpu, reducer = self.cpu, self.reducer
        cpu.phase = Phase.BACKWARD
        if sync:
            reducer.begin_backward()
        recomputed: set[tuple[str, ...]] = set()
        for segment, unit in self.backwards:
            block = self.block_of.get(segment, ())
            if block and block not in recomputed:
                recomputed.add(block)
                for again in block:
                    cpu.op(Op.RECOMPUTE, again)
            if sync:
                reducer.before(segment)
            self.compute(segment, unit, sync)
            if sync:
                reducer.after(segment)
                if segment in self.kept:
                    cpu.free(GRAD, *self.kept.pop(segment))
        if sync:
            reducer.end_backward()
        for unit_name, n_bytes in self.casts.values():
            cpu.free(Memory.UNSHARDED, unit_name, n_bytes, self.plan.param_dtype or "")

    def compute(self, segment: str, unit: Unit, sync: bool) -> None:
        """Backward of a segment. Autograd's own gradients are alive one by one, or kept where there is no sync yet."""
        cpu = self.cpu
        n_bytes, largest = self.grads.get(segment, (0, 0))
        dtype = unit.params[0].dtype if unit.params else ""
        dtype = dtype if self.alone else self.plan.param_dtype or dtype
        kept = segment in self.kept
        if n_bytes and not sync and not kept:
            cpu.alloc(GRAD, unit.name, n_bytes, dtype)
            self.kept[segment] = (unit.name, n_bytes, dtype)
            largest = 0
        if largest:
            cpu.alloc(Memory.TEMPORARY, unit.name, largest, dtype)
        cpu.op(Op.BWD, segment)
        if largest:
            if kept:
                cpu.op(Op.ACCUMULATE, unit.name, Lane.COMPUTE, n_bytes, dtype)
            cpu.free(Memory.TEMPORARY, unit.name, largest, dtype)


def _validate(plan: Plan) -> None:
    if plan.requires_gradient_sync is False:
        raise ValueError(
            f"Plan.requires_gradient_sync is False, so no gradient would ever be reduced; with api={plan.api!r} it is "
            f"True or 'last'"
        )
