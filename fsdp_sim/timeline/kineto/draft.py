"""An operation on its way from the trace to an `Event`: still in microseconds, its waits still other drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_sim.timeline.analysis import union
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import COLLECTIVES, Lane, Op, Phase
from fsdp_sim.timeline.kineto.host import HostState

TOUCH_US = 2.0  # what passes between two kernels that were launched in time
GAP_US = 20.0
"""A pause of the compute stream this long, in which communication runs, splits an operation in two."""


@dataclass(slots=True, eq=False)
class Draft:
    """See `Event` for the fields; ``key`` is shared by pieces of one operation."""

    op: Op
    unit: str
    state: HostState
    issue: float
    start: float
    end: float
    tid: int = 0
    lane: Lane = Lane.COMPUTE
    stream: int = 0
    key: tuple[object, ...] = ()
    bytes: int = 0
    group_size: int = 1
    dtype: str = ""
    process_group: str = ""
    purpose: str = ""  # of its process group, in the words of whoever made it
    turn: int = -1
    calls: tuple[str, ...] = ()  # the user's functions that led to it, outermost first
    note_start: float = 0.0  # of the annotation that issued it
    matmul: float = 0.0  # in kernels that multiply matrices
    attention: float = 0.0  # in fused attention
    unlaunched: float = 0.0  # inside of it no kernel ran, because the CPU had not launched the next
    waits: list[Draft] = field(default_factory=list)

    @property
    def is_collective(self) -> bool:
        return self.op in COLLECTIVES

    def event(self, seq: int, rank: int, origin: float, number: dict[int, int]) -> Event:
        def seconds(us: float) -> float:
            return (us - origin) * 1e-6

        state = self.state
        return Event(
            seq=seq, rank=rank, op=self.op, lane=self.lane, unit=self.unit, step=state.step,
            micro_batch=state.micro_batch, phase=Phase.OPTIMIZER if self.op is Op.OPTIM else state.phase,
            bytes=self.bytes, group_size=self.group_size, dtype=self.dtype, issue_s=seconds(self.issue),
            start_s=seconds(self.start), end_s=seconds(self.end),
            waits_on=tuple(sorted({number[id(d)] for d in self.waits})), source=self.calls[-1] if self.calls else "",
            stack=self.calls, unlaunched_s=self.unlaunched * 1e-6, matmul_s=self.matmul * 1e-6,
            attention_s=self.attention * 1e-6, group=self.process_group, turn=self.turn,
        )  # fmt: skip


def joined(
    pieces: Iterable[Draft], communication: Sequence[tuple[float, float]] | None, *, kernels: bool = False
) -> list[Draft]:
    """Pieces of one lane in the order in which they ran, neighbours of one key made one operation.

    Args:
        communication: disjoint intervals, ascending; pieces stay apart where the lane idled for `GAP_US` of them. None
            where the lane is a CPU thread, which is busy between its operations too.
        kernels: the pieces are kernels: between two of them their lane is idle.
    """
    out: list[Draft] = []
    at, reached = 0, float("-inf")
    for piece in sorted(pieces, key=lambda d: (d.start, d.end)):
        before, reached = reached, max(reached, piece.end)
        last = out[-1] if out else None
        if last is not None and last.key == piece.key:
            waited = 0.0
            if communication is not None and piece.start - last.end >= GAP_US:
                while at < len(communication) and communication[at][1] <= last.end:
                    at += 1
                i = at
                while i < len(communication) and communication[i][0] < piece.start:
                    waited += min(communication[i][1], piece.start) - max(communication[i][0], last.end)
                    i += 1
            if waited < GAP_US:
                pause = piece.start - before
                if kernels and pause > TOUCH_US and piece.issue > before - GAP_US:  # else it was queued
                    last.unlaunched += pause - waited
                last.end = max(last.end, piece.end)
                last.issue = min(last.issue, piece.issue)
                last.bytes += piece.bytes
                last.matmul += piece.matmul
                last.attention += piece.attention
                continue
        out.append(piece)
    return out


def intervals(drafts: Iterable[Draft]) -> list[tuple[float, float]]:
    """When any of them ran."""
    return union((d.start, d.end) for d in drafts)


def with_sizes(drafts: list[Draft]) -> None:
    """Give copies and casts the bytes of the collective that they prepare or unpack, which was issued by the same
    annotation or, for a copy-out, last before it.
    """
    by_note = {(d.note_start, d.op): d for d in drafts if d.is_collective}
    gathered: dict[str, Draft] = {}
    for d in sorted(drafts, key=lambda d: d.issue):
        if d.op is Op.ALL_GATHER:
            gathered[d.unit] = d
        gather, reduce = by_note.get((d.note_start, Op.ALL_GATHER)), by_note.get((d.note_start, Op.REDUCE_SCATTER))
        if d.op in (Op.AG_COPY_IN, Op.AG_CAST) and gather:
            d.bytes, d.dtype = gather.bytes // max(gather.group_size, 1), gather.dtype
        elif d.op is Op.AG_COPY_OUT and d.unit in gathered:
            d.bytes, d.dtype = gathered[d.unit].bytes, gathered[d.unit].dtype
        elif d.op in (Op.RS_COPY_IN, Op.DIV) and reduce:
            d.bytes, d.dtype = reduce.bytes, reduce.dtype
