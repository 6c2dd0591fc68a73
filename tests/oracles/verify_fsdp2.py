"""`Fsdp2Symbols`: the symbols that an FSDP2 program moves, and the order in which its model computes."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_sim.schedule.instruction import Instruction
from fsdp_sim.schedule.program import Program
from fsdp_sim.timeline import Memory, Op
from tests.oracles.buffers import Buffers, must_see
from tests.oracles.happens_before import Clock, HappensBefore, Use, wrong
from tests.oracles.symbols import Facts, UnitFacts
from tests.oracles.verify_grads import Gradients
from tests.oracles.verify_params import Parameters


class Fsdp2Symbols:
    """Follows a program; see `verify`.

    Attributes:
        forwarded, backwarded: how far the model has computed in this micro-batch, in segments from its beginning.
        recomputed: segments computed again in this backward.
    """

    def __init__(self, program: Program, order: HappensBefore, buffers: Buffers) -> None:
        self.order, self.buffers = order, buffers
        self.facts = Facts(program)
        self.params = params = Parameters(self.facts, buffers)
        self.grads = grads = Gradients(self.facts, order, buffers)
        self.forwarded, self.backwarded = 0, len(self.facts.sequence)
        self.recomputed: set[str] = set()
        self.norm: tuple[Op, Use] | None = None  # the last operation on norms in this step
        self.methods: dict[Op, Callable[[Instruction, Use, Clock], None]] = {
            Op.H2D: params.load, Op.AG_CAST: params.load, Op.AG_COPY_IN: params.copy_in,
            Op.ALL_GATHER: params.all_gather, Op.AG_COPY_OUT: params.copy_out, Op.CLONE: params.clone,
            Op.FWD: self.forward, Op.RECOMPUTE: self.recompute, Op.BWD: self.backward, Op.OPTIM: self.optimize,
            Op.UPCAST: grads.keep, Op.RS_COPY_IN: grads.reduce_copy_in, Op.DIV: grads.divide,
            Op.REDUCE_SCATTER: grads.reduce_scatter, Op.RS_COPY: grads.reduce_scatter, Op.ACCUMULATE: grads.accumulate,
            Op.ALL_REDUCE: self.all_reduce, Op.GRAD_CAST: grads.cast, Op.D2H: grads.to_cpu,
            Op.NORM: self.clip, Op.CLIP: self.clip,
        }  # fmt: skip

    def op(self, i: Instruction) -> None:
        method = self.methods.get(i.op)
        if method is None:
            raise wrong(i, "is no operation of FSDP2")
        method(i, *self.order.issue(i))

    def alloc(self, i: Instruction) -> None:
        self.buffers.alloc(i)

    def free(self, i: Instruction) -> None:
        if i.category in (Memory.RS_OUTPUT, Memory.UNSHARDED_GRAD):
            self.grads.free(i)
        else:
            self.buffers.need(i, i.category, i.unit)
            self.buffers.free(i, self.buffers.alive[i.category, i.unit][0])

    def end(self) -> None:
        """What is wrong when the program ends."""
        self.buffers.check_end()
        self.params.end()
        self.grads.end()

    def compute(self, i: Instruction, use: Use, clock: Clock) -> UnitFacts:
        if i.unit not in self.facts.owner:
            raise wrong(i, f"runs {i.unit}, which is no segment of the units")
        unit = self.facts.owner[i.unit]
        if unit.n_params:
            self.params.read_whole(i, unit.unit.name, use, clock)
        return unit

    def forward(self, i: Instruction, use: Use, clock: Clock) -> None:
        self.compute(i, use, clock)
        if self.forwarded == len(self.facts.sequence):  # the next micro-batch
            self.forwarded = 0
            self.norm = None
        expected = self.facts.sequence[self.forwarded]
        if i.unit != expected:
            raise wrong(i, f"runs out of order: {expected} comes next")
        self.forwarded += 1
        self.backwarded = len(self.facts.sequence)
        self.recomputed.clear()
        if i.unit in self.facts.trains:
            self.grads.expected.add((i.step, i.micro_batch, i.unit))

    def recompute(self, i: Instruction, use: Use, clock: Clock) -> None:
        self.compute(i, use, clock)
        self.recomputed.add(i.unit)

    def backward(self, i: Instruction, use: Use, clock: Clock) -> None:
        self.compute(i, use, clock)
        if self.forwarded < len(self.facts.sequence):
            raise wrong(i, f"runs before forward is done: {self.facts.sequence[self.forwarded]} has not run")
        expected = self.facts.sequence[self.backwarded - 1] if self.backwarded else "nothing"
        if i.unit != expected:
            raise wrong(i, f"runs out of order: {expected} comes next in backward")
        self.backwarded -= 1
        for segment in self.facts.checkpoints.get(i.unit, ()):
            if segment not in self.recomputed:
                raise wrong(i, f"needs activations of {segment} that were not kept; RECOMPUTE {segment} first")
        if i.unit in self.facts.trains:
            complete = self.facts.sequence.index(i.unit) == self.backwarded  # else it runs again, in backward later
            self.grads.computed(i, use, clock, complete)

    def clip(self, i: Instruction, use: Use, clock: Clock) -> None:
        """The norms of what the optimizer reads next, and what is scaled by them."""
        if self.forwarded < len(self.facts.sequence):
            raise wrong(i, f"runs before forward is done: {self.facts.sequence[self.forwarded]} has not run")
        comes_after = {Op.ALL_REDUCE: Op.NORM, Op.CLIP: Op.ALL_REDUCE if self.facts.shards > 1 else Op.NORM}.get(i.op)
        if comes_after:
            if self.norm is None or self.norm[0] is not comes_after:
                raise wrong(i, f"has no norms: {comes_after} comes before it")
            must_see(i, clock, self.norm[1], "which reduces the norms it needs")
        self.norm = (i.op, use)

    def all_reduce(self, i: Instruction, use: Use, clock: Clock) -> None:
        (self.grads.all_reduce if i.unit else self.clip)(i, use, clock)

    def optimize(self, i: Instruction, use: Use, clock: Clock) -> None:
        if self.forwarded < len(self.facts.sequence):
            raise wrong(i, f"runs before forward is done: {self.facts.sequence[self.forwarded]} has not run")
        if self.facts.plan.clip_grad_norm and (self.norm is None or self.norm[0] is not Op.CLIP):
            raise wrong(i, "gets gradients that are not clipped: CLIP comes before it")
        self.grads.optimize(i, use, clock)
        self.params.updated(i, use, clock)
