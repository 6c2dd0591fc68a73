"""The line format of the recordings of torch: a program printed so that it can be diffed against what torch issued.

A recording sees what passes through FSDP's hooks, so some of a program has no line: whole gradients, which autograd
allocates; temporaries; slices kept between forward and backward. And it notes a backward where it begins, hence
before the recomputation that the backward then asks for. Made on a CPU, it has what the CPU computes on the
current stream, and no sign that nothing is issued meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Memory, Op, Phase

RECORDED_MEMORY = frozenset({Memory.UNSHARDED, Memory.AG_OUTPUT, Memory.RS_INPUT, Memory.RS_OUTPUT, Memory.NONE})
EXTRA_OPS = frozenset(
    {Op.ACCUMULATE, Op.H2D, Op.D2H, Op.RS_COPY, Op.ACT_D2H, Op.ACT_H2D}
)  # not in torch's recorded format
NOT_RECORDED = "not recorded"  # detail of an alloc or free that a recording on the CPU cannot see


def lines(instructions: Iterable[Instruction], plan: Plan, every_op: bool) -> list[str]:
    """The lines of a program; events are numbered in the order in which they are recorded."""
    fsdp1 = plan.api == "fsdp1"
    numbers: dict[int, int] = {}
    out: list[str] = []
    recomputed: list[str] = []
    where: tuple[object, ...] = ()
    current: Lane | None = None
    for i in instructions:
        if i.detail == NOT_RECORDED or (i.op in EXTRA_OPS and not every_op):
            continue
        if i.category not in RECORDED_MEMORY and i.kind is not Kind.RECORD_STREAM:
            continue
        if (i.step, i.micro_batch, i.phase) != where:
            where = (i.step, i.micro_batch, i.phase)
            out.append(mark(i, fsdp1 and plan.grad_accum == 1))
        if i.kind is Kind.RECORD:
            numbers[i.event] = len(numbers) + 1
        if i.event in numbers:
            i = i._replace(event=numbers[i.event])
        if fsdp1 and i.communicator:
            i = i._replace(communicator="", reduce_op="")
        if i.op is Op.D2H:
            current = i.lane
        elif i.lane is Lane.CPU:
            i = i._replace(lane=current if i.op is Op.ACCUMULATE else Lane.COMPUTE)
        if i.op is Op.ALL_TO_ALL:  # a recording does not know whose tokens they are
            i = i._replace(unit="")
        if i.op is Op.RECOMPUTE or (recomputed and i.op is not Op.BWD):  # and what is issued for it
            recomputed += [i._replace(op=Op.FWD).line if i.op is Op.RECOMPUTE else i.line] * i.tensors
            continue
        out += [i.line] * i.tensors
        if recomputed:
            out += recomputed
            recomputed.clear()
    return out


def mark(i: Instruction, one_micro_batch: bool) -> str:
    """The line that opens a part of a step."""
    if i.phase is Phase.OPTIMIZER or one_micro_batch:
        return f"--- step {i.step}: {i.phase}"
    return f"--- step {i.step} microbatch {i.micro_batch}: {i.phase}"
