"""Gradients on their way through an FSDP2 program: computed, kept, reduced, divided, cast, copied to the CPU, freed."""

from __future__ import annotations

from dataclasses import replace

from fsdp_sim.schedule.comm import REDUCE_SCATTER, REPLICATE, SHARD
from fsdp_sim.schedule.instruction import Instruction
from fsdp_sim.schedule.lines import NOT_RECORDED
from fsdp_sim.timeline import Lane, Memory, Op
from tests.oracles.buffers import Buffer, Buffers
from tests.oracles.happens_before import CPU, Clock, HappensBefore, ProgramError, Use, wrong
from tests.oracles.symbols import Facts, Gradient, Sum, Whole


class Gradients:
    """Moves `Whole` and `Sum`.

    Attributes:
        expected: gradients whose forward has run in this step; the optimizer must get them.
        copied_to_cpu: copies that the CPU must have waited for by then.
    """

    def __init__(self, facts: Facts, order: HappensBefore, buffers: Buffers) -> None:
        self.facts, self.order, self.buffers = facts, order, buffers
        self.expected: set[Gradient] = set()
        self.copied_to_cpu: list[Use] = []

    # -- whole gradients

    def computed(self, i: Instruction, use: Use, clock: Clock, complete: bool) -> None:
        """The backward of a segment that has parameters to train; ``complete``: autograd hands the gradients out."""
        unit = self.facts.owner[i.unit].unit.name
        grads = self.buffers.need(i, Memory.UNSHARDED_GRAD, unit)
        holds: Whole = grads.holds or Whole()
        fresh = holds.fresh | ({(i.step, i.micro_batch, i.unit)} if complete else set())
        n = self.facts.units[unit].n_trained
        excess = grads.pieces - n - (n if holds.kept else 0)  # what autograd adds up beside what it adds it to
        moved = max(holds.moved, excess) if complete else holds.moved
        self.buffers.write(i, grads, use, clock, replace(holds, fresh=fresh, moved=moved))

    def keep(self, i: Instruction, use: Use, clock: Clock) -> None:
        """One more tensor is in the reduce dtype, new there or added; the last one moves the symbols."""
        grads = self.buffers.need(i, Memory.UNSHARDED_GRAD, i.unit)
        holds: Whole = self.buffers.read(i, grads, use, clock)
        if not holds.fresh:
            raise wrong(i, f"finds no gradient of {i.unit} that is not kept already")
        if i.op is Op.ACCUMULATE and not holds.kept:
            raise wrong(i, f"finds nothing kept of {i.unit} to add to")
        holds = replace(holds, moved=holds.moved + 1, done=holds.done + 1)
        if holds.done == self.facts.units[i.unit].n_trained:
            holds = replace(holds, fresh=frozenset(), kept=holds.kept | holds.fresh, done=0)
        self.buffers.write(i, grads, use, clock, holds)

    def reduce_copy_in(self, i: Instruction, use: Use, clock: Clock) -> None:
        grads = self.buffers.need(i, Memory.UNSHARDED_GRAD, i.unit)
        holds: Whole = self.buffers.read(i, grads, use, clock)
        if holds.kept and holds.fresh:
            raise wrong(i, f"reduces gradients of {i.unit} that were not added to those of earlier micro-batches")
        if not holds.kept | holds.fresh:
            raise wrong(i, f"reduces the gradients of {i.unit} twice")
        flat = self.buffers.need(i, Memory.RS_INPUT, i.unit)
        self.buffers.write(i, flat, use, clock, Sum(holds.kept | holds.fresh))
        grads.holds = Whole(moved=grads.pieces)

    # -- reduction

    def outputs(self, i: Instruction, written: bool = True) -> list[Buffer]:
        """O of a unit, oldest first, without those whose content is elsewhere."""
        some = self.buffers.alive.get((Memory.RS_OUTPUT, i.unit), [])
        return [b for b in some if (b.writer is not None) is written and not (b.holds and b.holds.consumed)]

    def newest(self, i: Instruction, written: bool = True) -> Buffer:
        outputs = self.outputs(i, written)
        if not outputs:
            why = "nothing has written" if written else "is not allocated"
            raise wrong(i, f"needs rs_output({i.unit}), which {why}")
        return outputs[-1]

    def divide(self, i: Instruction, use: Use, clock: Clock) -> None:
        flat = self.buffers.get(Memory.RS_INPUT, i.unit)
        before = flat is not None and flat.holds is not None and not flat.holds.scattered
        buffer = flat if before and flat is not None else self.newest(i)
        held: Sum = self.buffers.read(i, buffer, use, clock)
        divided = held.divided * float(i.detail.removeprefix("by "))
        self.buffers.write(i, buffer, use, clock, replace(held, divided=divided))

    def reduce_scatter(self, i: Instruction, use: Use, clock: Clock) -> None:
        flat = self.buffers.need(i, Memory.RS_INPUT, i.unit)
        held: Sum = self.buffers.read(i, flat, use, clock)
        if held.scattered:
            raise wrong(i, f"reduces the gradients of {i.unit} twice")
        communicator = REDUCE_SCATTER if self.facts.plan.separate_reduce_scatter_group else SHARD
        group = (i.group_size, i.communicator) if i.op is Op.REDUCE_SCATTER else (1, communicator)
        if group != (self.facts.shards, communicator):
            raise wrong(i, f"runs over {group[0]} ranks of {group[1]!r}; the shard group is {self.facts.shards} ranks")
        self.buffers.write(i, self.newest(i, written=False), use, clock, replace(held, scattered=True))
        flat.holds = replace(held, scattered=True)

    def accumulate(self, i: Instruction, use: Use, clock: Clock) -> None:
        """Into whole gradients kept (compute), into a partial sum, or into sharded gradients: all tensors at last."""
        if i.lane is Lane.COMPUTE:
            self.keep(i, use, clock)
            return
        *earlier, new = self.outputs(i) or [self.newest(i)]
        if not earlier:
            raise wrong(i, f"finds no earlier gradients of {i.unit} to add to")
        sums: list[Sum] = [self.buffers.read(i, b, use, clock) for b in (earlier[-1], new)]
        unit, partial = self.facts.units[i.unit], self.facts.replicas > 1 and not sums[1].replicated
        unit.loads[Op.ACCUMULATE] += 1
        if not partial and unit.loads[Op.ACCUMULATE] < unit.n_trained:
            return
        unit.loads[Op.ACCUMULATE] = 0
        if self.facts.plan.cpu_offload and not partial:
            for held in sums:
                self.check_on_cpu(i, i.unit, held)
        if sums[0].of & sums[1].of:
            raise wrong(i, f"adds the same gradients of {i.unit} twice")
        if sums[0].replicated != sums[1].replicated:
            raise wrong(i, f"adds gradients of {i.unit} that are all-reduced to some that are not")
        if sums[0].divided != sums[1].divided:
            raise wrong(i, f"adds gradients of {i.unit} divided by {sums[1].divided} to some by {sums[0].divided}")
        both = replace(sums[1], of=sums[0].of | sums[1].of, on_device=sums[0].on_device)
        self.buffers.write(i, new, use, clock, both)
        earlier[-1].holds = replace(sums[0], consumed=True)

    def all_reduce(self, i: Instruction, use: Use, clock: Clock) -> None:
        output = self.newest(i)
        held: Sum = self.buffers.read(i, output, use, clock)
        if held.replicated:
            raise wrong(i, f"reduces the gradients of {i.unit} between replicas twice")
        if (i.group_size, i.communicator) != (self.facts.replicas, REPLICATE):
            raise wrong(
                i, f"runs over {i.group_size} ranks of {i.communicator!r}; there are {self.facts.replicas} replicas"
            )
        others = [b for b in self.outputs(i)[:-1] if not b.holds.replicated]
        if others:
            raise wrong(i, f"leaves out what earlier micro-batches reduce-scattered of {i.unit}")
        self.buffers.write(i, output, use, clock, replace(held, replicated=True))

    def cast(self, i: Instruction, use: Use, clock: Clock) -> None:
        source, target = self.newest(i), self.newest(i, written=False)
        held: Sum = self.buffers.read(i, source, use, clock)
        self.buffers.write(i, target, use, clock, held)
        source.holds = replace(held, consumed=True)

    def to_cpu(self, i: Instruction, use: Use, clock: Clock) -> None:
        output = self.newest(i)
        held: Sum = self.buffers.read(i, output, use, clock)
        output.holds = replace(held, on_cpu=held.on_cpu + 1)
        self.copied_to_cpu.append(use)

    # -- the optimizer

    def optimize(self, i: Instruction, use: Use, clock: Clock) -> None:
        """The optimizer reads all gradients of the step."""
        for copy in self.copied_to_cpu:
            if not copy.seen_by(self.order.clocks[CPU]):
                raise wrong(i, f"runs before the CPU has waited for {copy.label} on {copy.stream}")
        self.copied_to_cpu.clear()
        arrived: set[Gradient] = set()
        for (category, name), some in self.buffers.alive.items():
            if category is Memory.RS_OUTPUT:
                for output in some:
                    if output.holds is None or not output.holds.consumed:
                        arrived |= self.gradients(i, name, output, use, clock)
        missing = sorted(self.expected - arrived)
        if missing:
            step, micro_batch, segment = missing[0]
            raise wrong(
                i,
                f"does not get the gradients of unit {self.facts.owner[segment].unit.name} from micro-batch "
                f"{micro_batch} of step {step} (BWD {segment}): they are never reduced",
            )
        self.expected.clear()

    def gradients(self, i: Instruction, unit: str, output: Buffer, use: Use, clock: Clock) -> frozenset[Gradient]:
        """The gradients of an O, which must be finished."""
        held: Sum = self.buffers.read(i, output, use, clock)
        if self.facts.replicas > 1 and not held.replicated:
            raise wrong(
                i, f"gets gradients of {unit} that were not all-reduced between the {self.facts.replicas} replicas"
            )
        if abs(held.divided / self.facts.units[unit].divide - 1) > 1e-9:
            raise wrong(i, f"gets gradients of {unit} divided by {held.divided}, not {self.facts.units[unit].divide}")
        self.check_on_cpu(i, unit, held)
        output.holds = replace(held, consumed=True)
        return held.of

    def check_on_cpu(self, i: Instruction, unit: str, held: Sum) -> None:
        n = self.facts.units[unit].n_trained
        if self.facts.plan.cpu_offload and held.on_cpu < n:
            raise wrong(i, f"gets gradients of {unit} of which {held.on_cpu} of {n} tensors were copied to the CPU")

    # -- memory

    def free(self, i: Instruction) -> None:
        if i.category is Memory.RS_OUTPUT:
            self.free_output(i)
            return
        grads = self.buffers.need(i, Memory.UNSHARDED_GRAD, i.unit)
        if isinstance(grads.holds, Whole):
            if grads.holds.moved < i.tensors:
                raise wrong(i, f"frees gradients of {i.unit} that were never reduced")
            grads.holds.moved -= i.tensors
        self.buffers.free(i, grads)

    def free_output(self, i: Instruction) -> None:
        """Which O is meant shows in what it holds: one whose content is elsewhere, or with the optimizer."""
        some = self.buffers.alive.get((Memory.RS_OUTPUT, i.unit)) or [self.buffers.need(i, i.category, i.unit)]
        if i.detail == NOT_RECORDED:
            output = self.newest(i)
            output.holds = replace(output.holds, on_device=False)
            return
        fitting = [b for b in some if (b.lane, b.dtype) == (i.lane, i.dtype) and b.holds and b.holds.consumed]
        if not fitting:
            raise wrong(i, f"frees gradients of {i.unit} that the optimizer did not get")
        if not i.bytes and fitting[0].holds.on_device:
            raise wrong(i, f"drops the CPU's gradients of {i.unit}; those on the device were never freed")
        self.buffers.free(i, fitting[0])

    def end(self) -> None:
        """Nothing is left for an optimizer to do."""
        if self.expected:
            _, micro_batch, segment = min(self.expected)
            raise ProgramError(f"the program ends without OPTIM after BWD {segment} of micro-batch {micro_batch}")
