"""Bytes allocated and reserved over time, from a snapshot."""

from __future__ import annotations

from typing import NamedTuple

from fsdp_sim.timeline.snapshot.blocks import Block
from fsdp_sim.timeline.snapshot.read import Snapshot

_SEGMENTS = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}


class Totals(NamedTuple):
    """After each action of the allocator, and at index 0 before all of them.

    Attributes:
        at_s: when; of index 0 as of the first.
        allocated_bytes: that tensors asked for. reserved_bytes: of segments, that torch has of the device.
    """

    at_s: list[float]
    allocated_bytes: list[int]
    reserved_bytes: list[int]

    @classmethod
    def of(cls, snapshot: Snapshot, blocks: list[Block]) -> Totals:
        """Forwards from what was there, which follows from what is there at the end and what came in between."""
        actions = snapshot.actions
        change = [0] * (len(actions) + 1)
        for block in blocks:
            change[block.born.number] += block.bytes
            if block.died is not None:
                change[block.died.number] -= block.bytes
        segments = [_SEGMENTS.get(one.action, 0) * one.bytes for one in actions]
        reserved = [snapshot.reserved_bytes - sum(segments)]
        allocated = [change[0]]
        for more, segment in zip(change[1:], segments, strict=True):
            allocated.append(allocated[-1] + more)
            reserved.append(reserved[-1] + segment)
        at_s = [one.at_s for one in actions]
        return cls([at_s[0] if at_s else 0.0, *at_s], allocated, reserved)

    @property
    def peak(self) -> int:
        """The index at which most is allocated."""
        return max(range(len(self.allocated_bytes)), key=self.allocated_bytes.__getitem__)
