"""`verify`: does every operation of a program find its data, and may every freed byte really be used again?

Symbolic data travels through the program: which shards of which version of the parameters a buffer holds, which
micro-batches' gradients, reduced over whom. So a program that reads an ungathered weight, frees too early, or reduces
a gradient twice or never is an error that names the operation and the unit, whatever the operations cost.
"""

from __future__ import annotations

from fsdp_sim.schedule.instruction import Kind
from fsdp_sim.schedule.program import Program
from tests.oracles.buffers import Buffers
from tests.oracles.happens_before import HappensBefore, ProgramError
from tests.oracles.verify_fsdp2 import Fsdp2Symbols

__all__ = ["ProgramError", "verify"]


def verify(program: Program) -> None:
    """Check that a program is right whatever its operations cost.

    Every wait is for something recorded, every buffer that is allocated is freed once, into the pool it came from, and
    memory is reused only after the streams that used it are known to be done. Segments run in order on whole parameters
    of the current version; gathers and reductions run over the right ranks, and read shards after the optimizer has
    written them; every gradient reaches the optimizer, once, divided as it should be, and the optimizer waits for it.

    Raises:
        ProgramError: names the instruction, its step, and what is wrong.
    """
    if program.plan.api != "fsdp2":
        from tests.oracles.flat_symbols import verify_flat  # with the builders of FSDP1, DDP and ZeRO

        verify_flat(program)
        return
    order = HappensBefore()
    buffers = Buffers(order)
    symbols = Fsdp2Symbols(program, order, buffers)
    steps = {
        Kind.OP: symbols.op,
        Kind.ALLOC: symbols.alloc,
        Kind.FREE: symbols.free,
        Kind.RECORD: order.record,
        Kind.WAIT: order.wait,
        Kind.CPU_SYNC: order.wait,
        Kind.WAIT_STREAM: order.wait_stream,
    }
    for instruction in program:
        if instruction.kind in steps:
            steps[instruction.kind](instruction)
        elif instruction.kind is not Kind.HOOK:
            raise ProgramError(f"{instruction.line} is no instruction of FSDP2")
    symbols.end()
