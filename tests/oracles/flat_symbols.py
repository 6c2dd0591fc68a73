"""What the buffers of FSDP1, DDP and ZeRO programs hold: which version of the parameters, which gradients.

[Note: symbols]  A gradient is (step, micro-batch, segment), fresh from the backward of its segment until a collective
has taken it. The version of parameters is how often the optimizer has run. A gather belongs to a unit under FSDP1, to a
bucket under ZeRO; a reduction to a unit under FSDP1, to a bucket elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fsdp_sim.schedule.buckets import Bucket, buckets_of
from fsdp_sim.schedule.checkpointing import checkpoints
from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.tree import walk_of
from fsdp_sim.timeline import Lane, Memory, Op
from tests.oracles.buffers import must_see
from tests.oracles.happens_before import Clock, HappensBefore, ProgramError, Use, wrong

Gradient = tuple[int, int, str]  # step, micro-batch, segment


@dataclass
class Carrier:
    """What is gathered and reduced together: an FSDP1 unit or a bucket.

    Attributes:
        segments: whose backward computes its gradients.
        shards, replicas: ranks of its two groups.
        divide: what sums of gradients have to be divided by, beyond the collectives' own mean.
        brings_shard: a shard has to be cast, or copied to the device, before it is gathered.
    """

    name: str
    segments: frozenset[str]
    shards: int
    replicas: int
    divide: float
    brings_shard: bool = False
    version: int = -1
    written: Use | None = None  # the parameters, by a gather or a cast
    shard: Use | None = None  # the shard as it is gathered
    computed: list[Use] = field(default_factory=list)  # what the next reduction reads
    copies: int = 0  # into the buffer that is reduced
    fresh: set[Gradient] = field(default_factory=set)
    scattered: set[Gradient] = field(default_factory=set)  # reduced, but not between replicas
    divided: float = 1.0
    last: Use | None = None  # of what a reduction did


class FlatSymbols:
    """Moves symbols through a program and checks each operation."""

    def __init__(self, program: Program, order: HappensBefore) -> None:
        plan, self.world_size = program.plan, program.world_size
        self.plan, self.order = plan, order
        self.version = 0
        self.optimizer: Use | None = None
        self.shard_reads: list[Use] = []
        self.alive: dict[tuple[Memory, str], int] = {}
        walk = [segment for _, segment in walk_of(program.units)]
        self.checkpointed = checkpoints(program.units, plan)
        self.recomputed: set[str] = set()
        self.owner = {segment: unit for unit in program.units for segment in unit.names_of_segments}
        if plan.api == "fsdp1":
            self.carriers = {u.name: c for u in program.units if u.params for c in [self._of_unit(u.name, program)]}
        else:
            self.carriers = {
                b.name: self._of_bucket(b) for b in buckets_of(walk_of(program.units), program.plan, program.world_size)
            }
        self.computing: dict[str, list[Carrier]] = {}
        for carrier in self.carriers.values():
            for segment in carrier.segments:
                self.computing.setdefault(segment, []).append(carrier)
        first = next(k for k, segment in enumerate(walk) if segment in self.computing)
        self.sequence = [(Op.FWD, s) for s in walk] + [(Op.BWD, s) for s in reversed(walk[first:])]
        self.place = 0  # in the sequence
        self.micro_batches = 0  # since the last optimizer step

    def _of_unit(self, name: str, program: Program) -> Carrier:
        unit = next(u for u in program.units if u.name == name)
        shards = self.plan.shard_size or self.world_size
        sharded = shards > 1 and self.plan.sharding_strategy != "NO_SHARD"
        # One flat parameter: if one of them trains, all get a gradient
        segments = (
            {s for p in unit.params for s in unit.segments_of(p)} if any(p.requires_grad for p in unit.params) else ()
        )
        ranks = self.world_size
        replicas = ranks // shards if sharded else ranks
        brings = self.plan.cpu_offload or (self.plan.param_dtype or unit.params[0].dtype) != unit.params[0].dtype
        return Carrier(name, frozenset(segments), shards if sharded else 1, replicas, ranks, brings)

    def _of_bucket(self, bucket: Bucket) -> Carrier:
        scatters = self.plan.api == "zero2"
        shards = self.world_size if scatters else 1
        return Carrier(bucket.name, frozenset(bucket.parts), shards, self.world_size // shards, 1.0)

    def step(self, i: Instruction) -> None:
        """Any instruction but waits and records."""
        if i.kind is Kind.ALLOC or i.kind is Kind.FREE:
            if i.bytes < 0:
                raise wrong(i, "is of less than nothing")
            key = (i.category, i.unit)
            self.alive[key] = self.alive.get(key, 0) + (1 if i.kind is Kind.ALLOC else -1)
            if self.alive[key] < 0:
                raise wrong(i, "is not allocated")
            if i.category is Memory.UNSHARDED and i.unit in self.carriers:
                self.carriers[i.unit].written = None
        elif i.kind is Kind.OP:
            use, clock = self.order.issue(i)
            if i.op in (Op.FWD, Op.BWD, Op.RECOMPUTE):
                self.compute(i, use, clock)
            elif i.op is Op.OPTIM:
                self.optimize(i, use, clock)
            elif i.op in (Op.AG_CAST, Op.H2D, Op.ALL_GATHER):
                self.gather(i, use, clock)
            else:
                self.reduce(i, use, clock)

    # Parameters

    def gather(self, i: Instruction, use: Use, clock: Clock) -> None:
        """Shards that the optimizer wrote become whole parameters, of this version."""
        if self.optimizer is not None:
            must_see(i, clock, self.optimizer, "which writes the shards it reads")
        self.shard_reads.append(use)
        carrier = self.carriers.get(i.unit)
        if carrier is None:  # DDP and ZeRO cast whole parameters
            return
        if i.op is not Op.ALL_GATHER:
            carrier.shard = use
            if carrier.shards > 1:
                return
        elif self.plan.api == "fsdp1":
            if i.group_size != carrier.shards:
                raise wrong(i, f"runs over {i.group_size} ranks; {i.unit} is cut into {carrier.shards} shards")
            if carrier.shard is not None:
                must_see(i, clock, carrier.shard, "which writes the shard it gathers")
                carrier.shard = None
            elif carrier.brings_shard:
                raise wrong(i, f"comes before the shard of {i.unit} is cast or on the device")
        elif carrier.version == self.version:
            raise wrong(i, "gathers what is gathered already")
        carrier.version, carrier.written = self.version, use

    def compute(self, i: Instruction, use: Use, clock: Clock) -> None:
        self.in_order(i)
        unit = self.owner[i.unit]
        if self.plan.api != "fsdp1":
            self.see_whole_parameters(i, clock)
        elif unit.params:
            self.see_unit(i, clock, self.carriers[unit.name])
        if i.op is Op.BWD:
            for carrier in self.computing.get(i.unit, ()):
                carrier.fresh.add((i.step, i.micro_batch, i.unit))
                carrier.computed.append(use)

    def in_order(self, i: Instruction) -> None:
        """Forward, backward, again for each micro-batch; the optimizer after the last."""
        if i.op is Op.RECOMPUTE:
            self.recomputed.add(i.unit)
            return
        if i.step != self.version:
            raise wrong(i, f"runs after {self.version} optimizer steps")
        if not self.place and self.plan.requires_gradient_sync is True:
            self.check_reduced(i)
        op, segment = self.sequence[self.place]
        if (i.op, i.unit) != (op, segment):
            raise wrong(i, f"runs out of order: {op} {segment} comes next")
        if i.op is Op.BWD and segment in self.checkpointed and segment not in self.recomputed:
            raise wrong(i, f"needs activations of {segment} that were not kept; RECOMPUTE {segment} must come before")
        self.place = (self.place + 1) % len(self.sequence)
        if not self.place:
            self.micro_batches += 1
            self.recomputed.clear()

    def see_unit(self, i: Instruction, clock: Clock, carrier: Carrier) -> None:
        kept = carrier.shards == 1 and carrier.written is None  # not sharded, not cast: the optimizer writes in place
        if kept:
            if self.optimizer is not None:
                must_see(i, clock, self.optimizer, "which writes the parameters it reads")
            return
        if not self.alive.get((Memory.UNSHARDED, carrier.name)) or carrier.written is None:
            raise wrong(i, f"reads the parameters of {carrier.name}, which are not gathered")
        must_see(i, clock, carrier.written, f"which gathers the parameters of {carrier.name} it reads")
        if carrier.segments and carrier.version != self.version:
            raise wrong(i, f"reads parameters of {carrier.name} from before the last optimizer step")

    def see_whole_parameters(self, i: Instruction, clock: Clock) -> None:
        if self.optimizer is not None:
            must_see(i, clock, self.optimizer, "which writes the parameters it reads")
        if self.plan.api == "ddp" or self.version == 0 or self.world_size == 1:
            return
        for carrier in self.carriers.values():
            if carrier.version != self.version or carrier.written is None:
                raise wrong(i, f"reads parameters of {carrier.name} that were not gathered after the optimizer step")
            must_see(i, clock, carrier.written, f"which gathers parameters of {carrier.name} it reads")

    # Gradients

    def reduce(self, i: Instruction, use: Use, clock: Clock) -> None:
        """A step on the way from whole gradients to those the optimizer reads."""
        carrier = self.carriers.get(i.unit)
        if carrier is None:  # gradients that are accumulated before they come into a bucket
            return
        if i.op in (Op.REDUCE_SCATTER, Op.ALL_REDUCE):
            self.collective(i, clock, carrier)
        elif carrier.last is not None and carrier.fresh == set():
            must_see(i, clock, carrier.last, f"which reduces the gradient of {i.unit} it reads")
        if i.op is Op.DIV:
            carrier.divided *= float(i.detail.removeprefix("by "))
        if carrier.fresh:
            carrier.computed.append(use)
            carrier.copies += i.op in (Op.RS_COPY_IN, Op.ACCUMULATE) and i.lane is Lane.COMPUTE
        else:
            carrier.last = use

    def collective(self, i: Instruction, clock: Clock, carrier: Carrier) -> None:
        between = i.op is Op.ALL_REDUCE and carrier.shards > 1  # replicas
        group = carrier.shards if i.op is Op.REDUCE_SCATTER else carrier.replicas
        if i.group_size != group:
            raise wrong(i, f"runs over {i.group_size} ranks; it has to be {group}")
        if between:
            if not carrier.scattered:
                raise wrong(i, f"reduces gradients of {i.unit} between replicas that are not reduced within them")
            assert carrier.last is not None
            must_see(i, clock, carrier.last, "which reduces the gradients it reads")
            carrier.scattered = set()
            return
        if not carrier.fresh:
            raise wrong(i, f"reduces gradients of {i.unit} twice")
        needed = 1 if self.plan.api == "fsdp1" else len(carrier.segments)
        if carrier.copies < needed:
            raise wrong(i, f"reduces {i.unit}, into which {carrier.copies} of {needed} gradients were copied")
        for earlier in carrier.computed:
            must_see(i, clock, earlier, f"which computes the gradients of {i.unit} it reads")
        goes_on = carrier.shards > 1 and self.plan.api == "fsdp1" and "HYBRID" in self.plan.sharding_strategy
        if goes_on:
            carrier.scattered |= carrier.fresh
        carrier.fresh, carrier.computed, carrier.copies = set(), [], 0

    def optimize(self, i: Instruction, use: Use, clock: Clock) -> None:
        if self.micro_batches != self.plan.grad_accum:
            raise wrong(i, f"runs after {self.micro_batches} of {self.plan.grad_accum} micro-batches")
        self.micro_batches = 0
        for read in self.shard_reads:
            must_see(i, clock, read, "which reads the shards it writes")
        self.check_reduced(i)
        for carrier in self.carriers.values():
            if carrier.last is not None:
                must_see(i, clock, carrier.last, f"which reduces the gradients of {carrier.name} it reads")
            if carrier.segments and not self.alone:
                self.check_division(i, carrier)
            carrier.fresh, carrier.computed, carrier.copies = set(), [], 0
            carrier.divided = 1.0
        self.version += 1
        self.optimizer, self.shard_reads = use, []

    @property
    def alone(self) -> bool:
        """One rank, that reduces nothing."""
        return self.world_size == 1 and self.plan.api != "fsdp1"

    def check_reduced(self, i: Instruction) -> None:
        for carrier in self.carriers.values():
            left = sorted(carrier.scattered | (set() if self.alone else carrier.fresh))
            if left:
                raise wrong(i, f"comes before the gradient of {left[0][2]} of micro-batch {left[0][1]} is reduced")

    def end(self) -> None:
        """After the last instruction."""
        if self.place or self.micro_batches:
            raise ProgramError("the program ends before its last optimizer step")
        for carrier in self.carriers.values():
            if self.plan.api in ("zero1", "zero2") and not self.alone and carrier.version != self.version:
                raise ProgramError(f"the parameters of {carrier.name} are not gathered after the last optimizer step")
        for (category, unit), pieces in self.alive.items():
            carrier_of = self.carriers.get(unit)
            frozen = category is Memory.UNSHARDED and carrier_of is not None and not carrier_of.segments
            if pieces and not frozen:  # parameters that backward does not need may be kept from step to step
                raise ProgramError(f"{category}({unit}) is still alive at the end of the program; it is never freed")

    def check_division(self, i: Instruction, carrier: Carrier) -> None:
        """Each reduction divides once."""
        syncs = self.plan.grad_accum if self.plan.requires_gradient_sync is True else 1
        expected = carrier.divide**syncs
        if abs(carrier.divided / expected - 1) > 1e-6:
            raise wrong(i, f"reads gradients of {carrier.name} divided by {carrier.divided}; it should be {expected}")


def verify_flat(program: Program) -> None:
    """Check an FSDP1, DDP or ZeRO program, whatever its operations cost.

    Compute reads parameters of the current version that are known to be gathered; gathers read shards that the
    optimizer is known to have written, and it writes none that is being read; every gradient is reduced exactly once
    before the optimizer, by the right ranks, divided as it should be, and the optimizer waits for it; what is freed is
    alive.

    Raises:
        ProgramError: names the instruction, its step, and what is wrong.
    """
    order = HappensBefore()
    symbols = FlatSymbols(program, order)
    for i in program:
        if i.kind is Kind.RECORD:
            order.record(i)
        elif i.kind in (Kind.WAIT, Kind.CPU_SYNC, Kind.CPU_BLOCK):
            order.wait(i)
        elif i.kind is Kind.WAIT_STREAM:
            order.wait_stream(i)
        else:
            symbols.step(i)
    symbols.end()
