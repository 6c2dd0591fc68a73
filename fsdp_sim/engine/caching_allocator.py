"""`CachingAllocator`: torch's allocator of GPU memory, block by block.

The device gives out segments (``cudaMalloc``); the allocator cuts blocks from them and keeps what is freed for whoever
allocates next on the same stream. So more is reserved than is allocated: what is cached for another stream, or lies in
pieces too small for what is asked.

Source: torch 2.13, ``c10/cuda/CUDACachingAllocator.cpp``, whose sizes are in ``c10/core/AllocatorConfig.h``.
``tests/engine/test_caching_allocator.py`` compares with recordings of torch's own compiled allocator, byte by byte.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from heapq import heappop, heappush
from itertools import count
from typing import Any

BLOCK_BYTES = 512  # kMinBlockSize: sizes are rounded up to a multiple
SMALL_BYTES = 2**20  # kSmallSize: what is no larger comes from segments of small blocks,
SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer: which are this large
LARGE_SEGMENT_BYTES = 20 * 2**20  # large_segment_size: of what is below
OWN_SEGMENT_BYTES = 10 * 2**20  # kMinLargeAlloc: and from this size on a segment of its own,
ROUND_SEGMENT_BYTES = 2 * 2**20  # kRoundLarge: in multiples of this
ADDRESS_SPACE_BYTES = 2**30 * LARGE_SEGMENT_BYTES  # of an expandable segment: more than any device has memory


class Block:
    """A piece of a segment: allocated, or free and mapped, or, of an expandable segment, address space alone.

    Attributes:
        before, after: its neighbours in the segment.
    """

    __slots__ = ("address", "after", "before", "bytes", "free", "mapped", "pool")

    def __init__(self, address: int, n_bytes: int, pool: _Pool, *, mapped: bool = True) -> None:
        self.address, self.bytes, self.pool, self.mapped = address, n_bytes, pool, mapped
        self.before: Block | None = None
        self.after: Block | None = None
        self.free = True


class _Pool:
    """What one stream has of the device, for small blocks or for large ones.

    Attributes:
        blocks: the free ones, by size and then by address: (bytes, address, block).
        unmapped: address space of expandable segments, by address.
    """

    def __init__(self, small: bool) -> None:
        self.small = small
        self.reserved_bytes = 0
        self.blocks: list[tuple[int, int, Block]] = []
        self.unmapped: list[Block] = []

    def add(self, block: Block) -> None:
        insort(self.blocks, (block.bytes, block.address, block))

    def remove(self, block: Block) -> None:
        del self.blocks[bisect_left(self.blocks, (block.bytes, block.address))]


class OutOfMemoryError(MemoryError):
    """The device has no more, and nothing that is cached could be given back."""


class CachingAllocator:
    """What one process holds of a GPU.

    Args:
        limit_bytes: what the device gives out; None is without end.
        expandable_segments: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``: one segment for each stream, which
            grows at its end in pages of 20 MiB (2 MiB of small blocks).

    Attributes:
        allocated_bytes: in use. ``active_bytes``: with what is freed but still used by another stream.
        reserved_bytes: taken from the device.
        most_active_bytes, most_reserved_bytes: of all moments so far.
        retries: how often the device had nothing more, so that the allocator waited for all streams, gave back what it
            could and asked again (``num_alloc_retries``).
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.active_bytes = self.reserved_bytes = 0
        self.most_active_bytes = self.most_reserved_bytes = 0
        self.retries = 0
        self._pools: dict[tuple[object, bool], _Pool] = {}
        self._kept: list[tuple[float, int, Block]] = []  # freed, but not before that moment
        self._numbers = count()
        self._end = 0  # of the addresses given out so far

    def allocate(self, n_bytes: int, stream: object, now_s: float = 0.0) -> Block:
        """A block of at least that many bytes from the pool of a stream.

        Raises:
            OutOfMemoryError: there is no room for it.
        """
        while self._kept and self._kept[0][0] <= now_s:
            self._freed(heappop(self._kept)[2])
        asked = max(1, -(-n_bytes // BLOCK_BYTES)) * BLOCK_BYTES
        small = asked <= SMALL_BYTES
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = _Pool(small)
        block = self._fitting(pool, asked) or self._new(pool, asked)
        if block is None:
            self._give_back()
            self.retries += 1
            block = self._new(pool, asked)
        if block is None:
            raise OutOfMemoryError(f"{n_bytes:,} bytes")
        rest = block.bytes - asked
        if rest >= BLOCK_BYTES if small or self.expandable_segments else rest > SMALL_BYTES:
            rest_block = _cut(block, asked)
            insort(pool.blocks, (rest, rest_block.address, rest_block))
        block.free = False
        self.allocated_bytes += block.bytes
        self.active_bytes += block.bytes
        if self.active_bytes > self.most_active_bytes:
            self.most_active_bytes = self.active_bytes
        return block

    def free(self, block: Block, until_s: float | None = None) -> None:
        """Give a block back; if other streams use it (``record_stream``), not before they have come that far."""
        self.allocated_bytes -= block.bytes
        if until_s is None:
            self._freed(block)
        else:
            heappush(self._kept, (until_s, next(self._numbers), block))

    def by_stream(self) -> dict[Any, int]:
        """What the pools of each stream have of the device."""
        found: dict[Any, int] = {}
        for (stream, _), pool in self._pools.items():
            if pool.reserved_bytes:
                found[stream] = found.get(stream, 0) + pool.reserved_bytes
        return found

    def state(self) -> tuple[object, ...]:
        """What decides, with the blocks in use, what becomes of the next one; equal at two moments that are alike.

        Segments do not change without ``_end``, ``retries`` or what is unmapped.
        """
        pools = {
            key: ([one[:2] for one in pool.blocks], [(one.address, one.bytes) for one in pool.unmapped])
            for key, pool in self._pools.items()
        }
        kept = [(until_s, block.address) for until_s, _, block in self._kept]
        return self._end, self.retries, self.reserved_bytes, self.active_bytes, self.allocated_bytes, kept, pools

    # -- blocks

    def _fitting(self, pool: _Pool, asked: int) -> Block | None:
        """The smallest free block that is large enough."""
        blocks = pool.blocks
        at = bisect_left(blocks, (asked,))
        if at == len(blocks):
            return None
        if self.expandable_segments:  # a block that can grow counts for as much as it can grow to
            while at + 1 < len(blocks) and _room(blocks[at + 1][2]) < _room(blocks[at][2]):
                at += 1
        return blocks.pop(at)[2]

    def _freed(self, block: Block) -> None:
        self.active_bytes -= block.bytes
        block.free = True
        self._merge(block)
        block.pool.add(block)

    @staticmethod
    def _merge(block: Block) -> None:
        """With its neighbours, if they are free and as mapped as it is."""
        for other in (block.before, block.after):
            if other is None or not other.free or other.mapped != block.mapped:
                continue
            if other.mapped:
                other.pool.remove(other)
            else:
                other.pool.unmapped.remove(other)
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after:
                    block.after.before = block
            block.bytes += other.bytes

    # -- segments

    def _new(self, pool: _Pool, asked: int) -> Block | None:
        """A block of the device's memory; None where it has none."""
        if self.expandable_segments:
            return self._expanded(pool, asked)
        if pool.small:
            size = SMALL_SEGMENT_BYTES
        elif asked < OWN_SEGMENT_BYTES:
            size = LARGE_SEGMENT_BYTES
        else:
            size = -(-asked // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES
        return Block(self._addresses(size), size, pool) if self._take(size, pool) else None

    def _take(self, n_bytes: int, pool: _Pool) -> bool:
        """Of the device, or, below 0, back to it."""
        if self.limit_bytes is not None and self.reserved_bytes + n_bytes > self.limit_bytes:
            return False
        self.reserved_bytes += n_bytes
        pool.reserved_bytes += n_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return True

    def _addresses(self, n_bytes: int) -> int:
        start, self._end = self._end, self._end + n_bytes
        return start

    def _give_back(self) -> None:
        """Wait for all streams, then give the device all segments (of expandable ones all pages) that are free."""
        while self._kept:
            self._freed(heappop(self._kept)[2])
        for pool in self._pools.values():
            for _, _, block in list(pool.blocks):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self._take(-block.bytes, pool)

    # -- expandable segments

    def _expanded(self, pool: _Pool, asked: int) -> Block | None:
        block = self._candidate(pool, asked)
        if not block.mapped and not self._map(block, min(block.bytes, asked)):
            return None
        while block.bytes < asked:
            following = block.after
            assert following is not None
            if not self._map(following, min(asked - block.bytes, following.bytes)):
                return None
            block = following
        pool.remove(block)
        return block

    @staticmethod
    def _page(pool: _Pool) -> int:
        return SMALL_SEGMENT_BYTES if pool.small else LARGE_SEGMENT_BYTES

    def _candidate(self, pool: _Pool, asked: int) -> Block:
        """Where the first room for so many bytes begins: free blocks and address space, one after the other."""
        for block in pool.unmapped:
            first = block.before if block.before and block.before.free else block
            room, at = 0, first
            while at is not None and at.free and room < asked:
                room += at.bytes
                at = at.after  # type: ignore[assignment]
            if room >= asked:
                return first
        space = Block(self._addresses(ADDRESS_SPACE_BYTES), ADDRESS_SPACE_BYTES, pool, mapped=False)
        pool.unmapped.append(space)
        return space

    def _map(self, block: Block, n_bytes: int) -> bool:
        """Put memory behind the first bytes of address space, in whole pages."""
        pool, page = block.pool, self._page(block.pool)
        size = -(-n_bytes // page) * page
        if not self._take(size, pool):
            return False
        at = pool.unmapped.index(block)
        if size < block.bytes:
            pool.unmapped[at] = _cut(block, size, mapped=False)
        else:
            del pool.unmapped[at]
        block.mapped = True
        self._merge(block)
        pool.add(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give the device the whole pages of a free block."""
        pool, page = block.pool, self._page(block.pool)
        start = -(-block.address // page) * page
        end = (block.address + block.bytes) // page * page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            head, block = block, _cut(block, start - block.address)
            pool.add(head)
        if end < block.address + block.bytes:
            pool.add(_cut(block, end - block.address))
        block.mapped = False
        self._take(-block.bytes, pool)
        self._merge(block)
        insort(pool.unmapped, block, key=lambda one: one.address)


def _cut(block: Block, n_bytes: int, *, mapped: bool = True) -> Block:
    """Shorten a block; returns what follows it."""
    rest = Block(block.address + n_bytes, block.bytes - n_bytes, block.pool, mapped=mapped)
    rest.before, rest.after = block, block.after
    if rest.after:
        rest.after.before = rest
    block.after, block.bytes = rest, n_bytes
    return rest


def _room(block: Block) -> int:
    """What a free block can grow to."""
    after = block.after
    return block.bytes + (after.bytes if after is not None and not after.mapped else 0)
