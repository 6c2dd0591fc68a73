"""What torch's caching allocator holds: blocks that are freed go back to the pool of the stream they came from.

A pool never shrinks by itself, so what is reserved is the sum over streams of the most that each has needed. Memory
that another stream has used too (``record_stream``, FSDP1) is given away again only when that stream has come that far:
until then it is active though it is free, and the pool grows instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from fsdp_sim.engine.run import Run
from fsdp_sim.schedule import Kind, Program
from fsdp_sim.timeline import Lane, Memory

BLOCK = 512  # bytes: every allocation is rounded up to a multiple (c10::cuda::CUDACachingAllocator: kMinBlockSize)
SEGMENT = 2 * 2**20  # bytes: what is asked of the device is (kRoundLarge)


class Pools(NamedTuple):
    """What the allocator holds.

    Attributes:
        active_bytes: the most at one moment that is alive, or freed but still used by another stream.
        by_stream: for each stream the most its pool needed at one moment, rounded up to what the device gives out.
        reserved_bytes: their sum. Without fragmentation, and if the device never runs out: then the allocator gives
            cached memory back and goes on, at the price of a stall.
    """

    active_bytes: int
    by_stream: dict[Lane, int]
    reserved_bytes: int


def pools(
    program: Program,
    states: Mapping[tuple[Memory, str], int],
    at: Sequence[int],
    changes: Sequence[int],
    run: Run | None,
) -> Pools:
    """Follow a program's changes of memory from pool to pool.

    Args:
        program: what was issued.
        states: bytes alive from the beginning, in the pool of compute.
        at, changes: the instruction that makes each change, and its bytes. What compute allocates is compute's.
        run: when the instructions ran. Without it ``record_stream`` keeps nothing.
    """
    instructions = program.instructions
    clocks: dict[int, tuple[float, float]] = {}
    if run is not None:
        clocks = {number: (cpu, reached) for number, cpu, reached in zip(*run.memory_times(), strict=True)}
    live = {Lane.COMPUTE: sum(states.values())}
    most = dict(live)
    active = highest = live[Lane.COMPUTE]
    kept: list[tuple[float, int, Lane]] = []  # freed, but not before that moment: (moment, bytes, pool)
    just_freed: list[tuple[int, int, Lane]] = []  # (number, bytes, pool) of the last frees in a row, of one buffer
    rows = list(zip(at, changes, strict=True))
    if run is not None:
        rows += [(n, 0) for n in clocks if instructions[n].kind is Kind.RECORD_STREAM]
        rows.sort(key=lambda row: row[0])
    for number, change in rows:
        i = instructions[number]
        if run is not None and number in clocks:
            while kept and kept[0][0] <= clocks[number][0]:
                _, n_bytes, lane = heappop(kept)
                live[lane] -= n_bytes
                active -= n_bytes
        follows = bool(just_freed) and just_freed[-1][0] == number - 1
        follows = follows and (i.category, i.unit) == (instructions[number - 1].category, instructions[number - 1].unit)
        if i.kind is Kind.RECORD_STREAM:
            for _, n_bytes, lane in just_freed if follows else ():
                live[lane] += n_bytes
                active += n_bytes
                heappush(kept, (clocks[number][1], n_bytes, lane))
            just_freed = []
            continue
        lane = Lane.COMPUTE if i.kind is Kind.OP or i.lane is None else i.lane
        size = -(-abs(change) // BLOCK) * BLOCK
        if change < 0:
            live[lane] = live.get(lane, 0) - size
            active -= size
            if i.kind is Kind.FREE:
                just_freed = [*(just_freed if follows else ()), (number, size, lane)]
        else:
            live[lane] = live.get(lane, 0) + size
            active += size
            most[lane] = max(most.get(lane, 0), live[lane])
            highest = max(highest, active)
    by_stream = {lane: -(-n_bytes // SEGMENT) * SEGMENT for lane, n_bytes in most.items() if n_bytes}
    return Pools(highest, by_stream, sum(by_stream.values()))
