"""Parameters on their way through an FSDP2 program: brought, cast, gathered, copied out, kept as a slice, read."""

from __future__ import annotations

from fsdp_sim.schedule.comm import POST_FORWARD, SHARD
from fsdp_sim.schedule.instruction import Instruction
from fsdp_sim.timeline import Memory, Op
from tests.oracles.buffers import Buffer, Buffers, must_see
from tests.oracles.happens_before import Clock, ProgramError, Use, wrong
from tests.oracles.symbols import Facts, Parts


class Parameters:
    """Moves `Parts`.

    Attributes:
        optimizer: the last one, which wrote the shards.
        shard_reads: operations since then that read them.
        mistargeted: those of them, by unit, that brought shards to the device which nothing has copied out yet. For an
            unshard that is never copied out, torch makes a stream wait and not the CPU (FSDPParamGroup's
            finalize_backward), so an optimizer on the CPU may overtake the copy; what is copied is never read.
    """

    def __init__(self, facts: Facts, buffers: Buffers) -> None:
        self.facts, self.buffers = facts, buffers
        self.optimizer: Use | None = None
        self.shard_reads: list[Use] = []
        self.mistargeted: dict[str, list[Use]] = {}

    def load(self, i: Instruction, use: Use, clock: Clock) -> None:
        """Shards to the device, or to the dtype of the gather."""
        if i.op is Op.H2D or not self.facts.plan.cpu_offload:
            self.read_shards(i, use, clock)
        if i.op is Op.H2D:
            self.mistargeted.setdefault(i.unit, []).append(use)
        self.facts.units[i.unit].loads[i.op] += 1
        temporary = self.buffers.get(Memory.TEMPORARY, i.unit)
        if temporary:
            self.buffers.write(i, temporary, use, clock, Parts(1, self.facts.shards, self.facts.version))

    def read_shards(self, i: Instruction, use: Use, clock: Clock) -> None:
        if self.optimizer is not None:
            must_see(i, clock, self.optimizer, "which writes the shards it reads")
        self.shard_reads.append(use)

    def check_loads(self, i: Instruction, foreach: bool, n: int) -> None:
        """All shards of n parameters must have been brought and cast."""
        unit = self.facts.units[i.unit]
        casts = unit.n_cast[n]
        should = {Op.H2D: n if self.facts.plan.cpu_offload else 0, Op.AG_CAST: min(casts, 1) if foreach else casts}
        for op, times in should.items():
            if unit.loads[op] != times:
                raise wrong(i, f"comes after {unit.loads[op]} {op} of {i.unit}; it needs {times}")

    def copy_in(self, i: Instruction, use: Use, clock: Clock) -> None:
        gathered, temporary = self.buffers.get(Memory.AG_OUTPUT, i.unit), self.buffers.get(Memory.TEMPORARY, i.unit)
        kept = self.buffers.get(Memory.SHARDED, i.unit)
        is_new = gathered is not None and gathered.writer is None  # else of an earlier run, or none
        if not is_new and kept is not None and temporary is not None and temporary.writer is None:
            self.buffers.write(i, temporary, use, clock, self.read_slice(i, kept, use, clock))
            return
        if i.bytes * self.facts.post_forward_shards != self.facts.units[i.unit].gather_bytes:
            kept = None  # if any, it was left by a forward without backward; the shards are read
        gathered = self.buffers.need(i, Memory.AG_OUTPUT, i.unit)
        if temporary is not None:
            parts = self.buffers.read(i, temporary, use, clock)
        elif kept is not None:
            parts = self.read_slice(i, kept, use, clock)
        else:
            self.read_shards(i, use, clock)
            parts = Parts(1, self.facts.shards, self.facts.version)
        if parts.communicator == SHARD:
            self.check_loads(i, foreach=not self.facts.plan.cpu_offload, n=self.facts.units[i.unit].n_params)
        self.facts.units[i.unit].loads.clear()
        self.buffers.write(i, gathered, use, clock, parts)

    def read_slice(self, i: Instruction, kept: Buffer, use: Use, clock: Clock) -> Parts:
        parts: Parts = self.buffers.read(i, kept, use, clock)
        if parts.written < self.facts.units[i.unit].n_params:
            raise wrong(
                i, f"reads {kept}, of which {parts.written} of {self.facts.units[i.unit].n_params} tensors are written"
            )
        return parts

    def all_gather(self, i: Instruction, use: Use, clock: Clock) -> None:
        gathered = self.buffers.need(i, Memory.AG_OUTPUT, i.unit)
        parts: Parts = self.buffers.read(i, gathered, use, clock)
        if parts.have != 1:
            raise wrong(i, f"gathers what is gathered already: {gathered} holds {parts.have} of {parts.of} shards")
        if (i.group_size, i.communicator) != (parts.of, parts.communicator):
            raise wrong(
                i,
                f"runs over {i.group_size} ranks of {i.communicator!r}, but {i.unit} is cut into {parts.of} shards "
                f"over {parts.communicator!r}",
            )
        self.buffers.write(i, gathered, use, clock, parts._replace(have=parts.of))

    def copy_out(self, i: Instruction, use: Use, clock: Clock) -> None:
        self.mistargeted.pop(i.unit, None)
        unit, whole = self.facts.units[i.unit], self.buffers.need(i, Memory.UNSHARDED, i.unit)
        if self.facts.shards == 1:
            self.read_shards(i, use, clock)
            written = (whole.holds.written if whole.holds else 0) + 1
            if written > unit.n_params:
                raise wrong(i, f"copies into {whole}, which is whole already")
            self.check_loads(i, foreach=False, n=written)
            if written == unit.n_params:
                unit.loads.clear()
            self.buffers.write(i, whole, use, clock, Parts(1, 1, self.facts.version, SHARD, written))
            return
        parts: Parts = self.buffers.read(i, self.buffers.need(i, Memory.AG_OUTPUT, i.unit), use, clock)
        if parts.have < parts.of:
            raise wrong(i, f"reads ag_output({i.unit}), which holds {parts.have} of {parts.of} shards")
        self.buffers.write(i, whole, use, clock, parts._replace(written=unit.n_params))
        kept = self.buffers.get(Memory.SHARDED, i.unit)
        if kept and parts.communicator == POST_FORWARD:
            kept.holds = kept.holds._replace(have=0)  # gathered; it must be freed now

    def clone(self, i: Instruction, use: Use, clock: Clock) -> None:
        parts = self.read_whole(i, i.unit, use, clock)
        kept = self.buffers.need(i, Memory.SHARDED, i.unit)
        if kept.holds and not kept.holds.have:
            raise wrong(i, f"finds the slice of {i.unit} from an earlier forward, which was gathered and never freed")
        before = kept.holds.written if kept.holds and kept.holds.version == self.facts.version else 0
        holds = Parts(1, self.facts.post_forward_shards, parts.version, POST_FORWARD, before + 1)
        self.buffers.write(i, kept, use, clock, holds)

    def read_whole(self, i: Instruction, unit: str, use: Use, clock: Clock) -> Parts:
        """Parameters must be whole and up to date."""
        whole = self.buffers.need(i, Memory.UNSHARDED, unit)
        parts: Parts = self.buffers.read(i, whole, use, clock)
        if parts.have < parts.of or parts.written < self.facts.units[unit].n_params:
            raise wrong(i, f"reads {whole}, which is not whole")
        if parts.version != self.facts.version:
            raise wrong(
                i,
                f"reads {whole} as gathered before optimizer step {parts.version}, which changed the shards; reshard "
                f"after the last backward",
            )
        return parts

    def updated(self, i: Instruction, use: Use, clock: Clock) -> None:
        """The optimizer writes the shards."""
        mistargeted = {read for reads in self.mistargeted.values() for read in reads}
        for read in self.shard_reads:
            if read not in mistargeted:
                must_see(i, clock, read, "which reads the shards it writes")
        self.shard_reads.clear()
        self.mistargeted.clear()
        self.facts.version += 1
        self.optimizer = use

    def end(self) -> None:
        """A slice may be left by a forward without backward; one that was gathered must be gone."""
        for (category, unit), some in self.buffers.alive.items():
            if category is Memory.SHARDED and any(b.holds and not b.holds.have for b in some):
                raise ProgramError(f"{category}({unit}) is still alive at the end of the program; it is never freed")
