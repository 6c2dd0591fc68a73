"""One operation of a run: the row of a timeline."""

from __future__ import annotations

import msgspec

from fsdp_sim.timeline.kinds import MEMORY, Lane, Memory, Op, Phase

MOST_S = 1e10
MOST_BYTES = 2**62


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One row of a timeline.

    ``seq`` counts a rank's events in the order in which its CPU issued them. "Order" always means issue order
    on a rank, or order within a lane; lanes are never ordered against each other.

    Attributes:
        bytes: for a collective the whole message (all-gather output, reduce-scatter input); for ``alloc`` and
            ``free`` the size of the buffer; 0 for compute.
        issue_s: when the CPU issued it. ``start_s`` and ``end_s``: when it ran.
        waits_on: ``seq`` of the events of this rank it had to wait for, beyond the previous one on its lane.
        source: ``file:line`` that issued it, or empty. Files of the mini-FSDP are named from the package on:
            ``fsdp_sim/mini/group.py:169``.
        stack: ``file:line`` of the calls that led to ``source``, outermost first, where they are known.
        category: what an ``alloc`` or ``free`` is for.
        unlaunched_s: of an operation of many kernels the seconds in which none of them ran, because the CPU had not
            launched the next.
        matmul_s, attention_s: of a measured operation the seconds in kernels that multiply matrices, and in fused
            attention; the others move bytes.
        group: of a measured collective its process group, the same text on every rank of it; empty where nobody said.
        turn: the number that torch gave it within that group, the same on every rank; -1 where nobody said.
    """

    seq: int
    rank: int
    op: Op
    lane: Lane
    unit: str = ""
    step: int = 0
    micro_batch: int = 0
    phase: Phase = Phase.NONE
    bytes: int = 0
    group_size: int = 1
    dtype: str = ""
    issue_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0
    waits_on: tuple[int, ...] = ()
    source: str = ""
    stack: tuple[str, ...] = ()
    category: Memory = Memory.NONE
    unlaunched_s: float = 0.0
    matmul_s: float = 0.0
    attention_s: float = 0.0
    group: str = ""
    turn: int = -1

    @property
    def label(self) -> str:
        """``FWD layers.0`` or ``ALL_GATHER(layers.0)``, as the recorded programs print it."""
        if self.op in (Op.FWD, Op.BWD):
            return f"{self.op} {self.unit}".rstrip()
        return f"{self.op}({self.unit})" if self.unit else str(self.op)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def is_memory(self) -> bool:
        return self.op in MEMORY


def checked(event: Event) -> Event:
    """The event, if it can have been: for those that come from a file.

    Raises:
        ValueError: it ends before it starts, or a number is out of all bounds; names the event.
    """
    which = f"event {event.seq} of rank {event.rank} ({event.op} {event.unit[:60]}".rstrip() + ")"
    if not event.is_memory and event.end_s < event.start_s:
        raise ValueError(f"{which} ends at {event.end_s:g} s, before it starts at {event.start_s:g} s; record it again")
    if event.unlaunched_s and not 0 <= event.unlaunched_s <= event.duration_s * (1 + 1e-9):
        raise ValueError(
            f"{which} has unlaunched_s {event.unlaunched_s:g}, which is a part of the {event.duration_s:g} s it lasts; "
            "record it again"
        )
    if not all(-MOST_S < time_s < MOST_S for time_s in (event.issue_s, event.start_s, event.end_s)):
        raise ValueError(f"{which} has a time beyond {MOST_S:g} s; times are seconds since the recording began")
    if not (0 <= event.bytes < MOST_BYTES and 0 <= event.rank < 2**31):
        raise ValueError(f"{which} has {event.bytes} bytes; ranks and bytes are numbers from 0 that a machine can have")
    return event
