"""What torch's allocator holds while a program runs: its tensors, in the order in which they come and go.

A program says which buffers FSDP takes and when; the tape of a segment which tensors its compute makes. Both go through
`CachingAllocator`, step by step, until a further step takes no more of the device: the first has room where the
optimizer's states come to lie at its end, so the second may need new segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fsdp_sim.cost import Work
from fsdp_sim.engine.caching_allocator import Block, CachingAllocator, OutOfMemoryError
from fsdp_sim.engine.run import Run
from fsdp_sim.engine.tensors import Move, tensors
from fsdp_sim.schedule import Program
from fsdp_sim.timeline import Lane

STEPS = 4  # played at most


class Allocator(NamedTuple):
    """How torch's allocator is set, and what it is asked for beside tensors.

    Attributes:
        limit_bytes: what the device gives out; None is without end.
        expandable_segments: see `CachingAllocator`.
        workspace_bytes: what cuBLAS takes for each thread that multiplies matrices: forward's, and autograd's.
    """

    limit_bytes: int | None = None
    expandable_segments: bool = False
    workspace_bytes: int = 0


UNLIMITED = Allocator()


class Pools(NamedTuple):
    """What the allocator holds.

    Attributes:
        active_bytes: the most at one moment that is in use, or freed but still used by another stream.
        reserved_bytes: the most that it takes from the device: ``torch.cuda.max_memory_reserved``.
        by_stream: for each stream what its pools have of the device at the end.
        retries: how often in a step the device has no more, so that the allocator waits for all streams and gives back
            what it caches (``num_alloc_retries``); of the last step that was played.
        fails: even so there is no room: ``torch.cuda.OutOfMemoryError``.
    """

    active_bytes: int
    reserved_bytes: int
    by_stream: dict[Lane, int]
    retries: int = 0
    fails: bool = False


def pools(
    program: Program, work: Mapping[str, Work] | None, run: Run | None = None, setting: Allocator = UNLIMITED
) -> Pools:
    """Follow a program's tensors from pool to pool.

    Args:
        work: what the segments keep and need; without it FSDP's buffers alone.
        run: when the instructions ran. Without it ``record_stream`` keeps nothing.
    """
    found = tensors(program, work, run)
    allocator = CachingAllocator(setting.limit_bytes, expandable_segments=setting.expandable_segments)
    alive: dict[int, Block] = {}
    reserved = retries = 0
    fails = False
    try:
        for n_bytes in (*found.parameters, *[setting.workspace_bytes] * (2 if setting.workspace_bytes else 0)):
            allocator.allocate(n_bytes, Lane.COMPUTE)
        for step in range(STEPS):
            reserved, retries = allocator.reserved_bytes, allocator.retries
            play(allocator, found.before_optimizer, alive, step * found.step_s)
            if step == 0:
                for n_bytes in found.states:
                    allocator.allocate(n_bytes, Lane.COMPUTE)
            play(allocator, found.after, alive, step * found.step_s)
            for block in alive.values():  # what the next step would find and not make again
                allocator.free(block)
            alive.clear()
            if step and allocator.reserved_bytes == reserved:
                break
    except OutOfMemoryError:
        fails = True
    return Pools(
        allocator.most_active_bytes, allocator.most_reserved_bytes, allocator.by_stream(),
        allocator.retries - retries, fails,
    )  # fmt: skip


def play(
    allocator: CachingAllocator, pieces: Sequence[list[Move]], alive: dict[int, Block], start_s: float = 0.0
) -> None:
    """Play moves, piece by piece. One after which all is as before changes nothing when it comes again, and is skipped.

    That is so where no moment matters (``record_stream``): pieces with different times are not equal.

    Args:
        alive: the block of each tensor; kept up to date.
        start_s: when the first piece begins.
    """
    before = after = None
    idle: list[Move] | None = None
    for place, piece in enumerate(pieces):
        if piece == idle:
            continue
        again = place + 1 < len(pieces) and pieces[place + 1] == piece
        if again and after is None:
            after = _state(allocator, alive)
        before = after
        _play(allocator, piece, alive, start_s)
        after = _state(allocator, alive) if again else None
        idle = piece if again and before == after else None


def _state(allocator: CachingAllocator, alive: Mapping[int, Block]) -> tuple[object, ...]:
    return allocator.state(), {tensor: (block.address, block.bytes) for tensor, block in alive.items()}


def _play(allocator: CachingAllocator, moves: Iterable[Move], alive: dict[int, Block], start_s: float) -> None:
    allocate, free = allocator.allocate, allocator.free
    for tensor, n_bytes, lane, now_s, until_s in moves:
        if n_bytes:
            alive[tensor] = allocate(n_bytes, lane, start_s + now_s)
        elif tensor in alive:
            free(alive.pop(tensor), None if until_s is None else start_s + until_s)
