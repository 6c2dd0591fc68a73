"""The bytes alive over time as a `Timeline`: what the simulator and the figures of `fsdp_sim.viz` have too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from fsdp_sim.timeline import Event, Header, Lane, Memory, Op, Phase, Timeline
from fsdp_sim.timeline.snapshot import AllocationMoment, Block, phase_of, purposes

AS_OP = {Phase.FORWARD: Op.FWD, Phase.BACKWARD: Op.BWD, Phase.OPTIMIZER: Op.OPTIM}


class StepMemory:
    """The memory of a step on one rank: what `counted` and `on_gpu` of this folder find.

    Complete when their block has ended.

    Attributes:
        blocks: all that was alive at any moment.
        timeline: the same as bytes alive by category, see `timeline_of`.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.timeline = Timeline(Header(producer="labs.measure.allocations", clock="measured", world_size=1), [])


def timeline_of(blocks: Sequence[Block], header: Header, rank: int = 0) -> Timeline:
    """Blocks as the events of a rank: each alloc and free with its category, and each phase as one operation.

    A phase lasts from the first allocation made in it to the first of the next. Seconds count from the
    first moment of the recording; what was there before is allocated then.
    """
    ends: list[tuple[AllocationMoment, Op, Memory, int]] = []
    for block, category in zip(blocks, purposes(blocks), strict=True):
        if block.bytes:
            ends.append((block.born, Op.ALLOC, category, block.bytes))
            if block.died is not None:
                ends.append((block.died, Op.FREE, category, block.bytes))
    ends.sort(key=lambda end: end[0].number)
    events: list[Event] = []
    phase, micro_batch, origin_s = Phase.NONE, -1, min((m.at_s for m, *_ in ends if m.number), default=0.0)
    begun: list[int] = []  # the events of phases
    for moment, op, category, n_bytes in ends:
        at_s = max(moment.at_s - origin_s, 0.0)
        here = phase_of(moment.frames) if op is Op.ALLOC and moment.number else Phase.NONE
        if here is not Phase.NONE and here is not phase:
            phase = here
            micro_batch += phase is Phase.FORWARD
            begun.append(len(events))
            events.append(_event(rank, AS_OP[phase], phase, max(micro_batch, 0), at_s, unit="model"))
        change = {"bytes": n_bytes, "category": category}
        events.append(_event(rank, op, phase, max(micro_batch, 0), at_s, **change))
    until_s = [events[i].start_s for i in begun[1:]] + [events[-1].start_s if events else 0.0]
    for i, end_s in zip(begun, until_s, strict=False):
        events[i] = msgspec.structs.replace(events[i], end_s=end_s)
    return Timeline(header, [msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(events)])


def at_peak(timeline: Timeline, rank: int = 0) -> dict[Memory, int]:
    """What is alive on a rank when the most is, in bytes by category, largest first: of any timeline with memory.

    Raises:
        ValueError: the rank has no memory in it.
    """
    changes = [event for event in timeline if event.rank == rank and event.is_memory]
    if not changes:
        raise ValueError(f"the timeline has no memory of rank {rank}; record it with labs.measure.allocations")
    signed = np.array([event.bytes if event.op is Op.ALLOC else -event.bytes for event in changes])
    peak = int(np.cumsum(signed).argmax())
    found: dict[Memory, int] = {}
    for event, change in zip(changes[: peak + 1], signed[: peak + 1].tolist(), strict=True):
        found[event.category] = found.get(event.category, 0) + change
    return {category: n_bytes for category, n_bytes in sorted(found.items(), key=lambda one: -one[1]) if n_bytes}


def _event(rank: int, op: Op, phase: Phase, micro_batch: int, at_s: float, **fields: Any) -> Event:
    return Event(
        seq=0, rank=rank, op=op, lane=Lane.COMPUTE, phase=phase, micro_batch=micro_batch,
        issue_s=at_s, start_s=at_s, end_s=at_s, **fields,
    )  # fmt: skip
