"""Which operations an operation waited for on other lanes.

Where the trace says so (``cuda_sync`` events, recorded with ``enable_cuda_sync_events=True``), exactly that. Else by
the rules that torch's FSDP follows: an all-gather after its copy-in and after the copy-out that frees its buffer, a
copy-out after its all-gather, a reduce-scatter after its copy-in, the next copy-in after the reduce-scatter that
holds the buffer, an all-reduce after its reduce-scatter, the optimizer after all of them; and collectives of one
process group one by one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from fsdp_sim.timeline.kinds import COMM_LANES, Lane, Op, Phase
from fsdp_sim.timeline.kineto.draft import Draft
from fsdp_sim.timeline.kineto.host import LOSS
from fsdp_sim.timeline.kineto.names import ROOT
from fsdp_sim.timeline.kineto.rows import StreamWait

UNSHARDS = (Op.H2D, Op.AG_CAST, Op.AG_COPY_IN)


def derive_waits(
    drafts: Sequence[Draft],
    fsdp: int,
    limiter: Sequence[float] = (),
    recorded: dict[int, list[Draft]] | None = None,
) -> None:
    """Fill in ``waits`` of drafts sorted by issue.

    Args:
        fsdp: 2, 1, or 0.
        limiter: when FSDP1's rate limiter looked at its queue, ascending.
        recorded: by id of a draft those it waited for, where the trace tells.
    """
    if recorded is not None:
        for draft in drafts:
            draft.waits = [d for d in recorded.get(id(draft), ()) if d is not draft]
        return
    seen = _IssuedSoFar()
    looked = 0
    for draft in drafts:
        while looked < len(limiter) and limiter[looked] <= draft.issue:
            seen.limit()
            looked += 1
        rule = _fsdp1 if fsdp == 1 else _fsdp2 if fsdp == 2 else _other
        found = rule(draft, seen)
        if draft.is_collective and (before := seen.group.get(draft.process_group)) is not None:
            found.append(before)
        draft.waits = list(
            {id(d): d for d in found if d is not None and d.lane is not draft.lane and d is not draft}.values()
        )
        seen.add(draft)


class _IssuedSoFar:
    """What was issued so far."""

    def __init__(self) -> None:
        self.last: dict[tuple[Op, str], Draft] = {}
        self.on_lane: dict[Lane, Draft] = {}
        self.copy_outs: list[Draft] = []
        self.group: dict[str, Draft] = {}
        self.reduces: list[Draft] = []
        self.resharded: list[Draft] = []  # FSDP1: the last computing with what was freed since, oldest first
        self.limited: dict[Op, list[Draft]] = {
            op: [] for op in (*UNSHARDS, Op.ALL_GATHER)
        }  # FSDP1: what the CPU waited for
        self.waited: set[tuple[Lane, int]] = set()
        self.unwaited: dict[Lane, Draft] = {}  # reductions that compute has not waited for
        self.forward: tuple[int, int] | None = None  # step and micro-batch of the last root's gather

    def add(self, draft: Draft) -> None:
        self.last[draft.op, draft.unit] = draft
        self.on_lane[draft.lane] = draft
        if draft.op is Op.AG_COPY_OUT:
            self.copy_outs.append(draft)
        if draft.is_collective:
            self.group[draft.process_group] = draft
        if draft.op is Op.REDUCE_SCATTER:
            self.reduces.append(draft)
        if draft.lane in COMM_LANES - {Lane.ALL_GATHER, Lane.UNSHARD}:
            self.unwaited[draft.lane] = draft

        if draft.lane is Lane.COMPUTE and draft.unit not in (ROOT, LOSS, ""):
            last = self.resharded[-1] if self.resharded else None
            if last is not None and (last.unit, last.state.phase) == (draft.unit, draft.state.phase):
                self.resharded.pop()
            self.resharded.append(draft)

    def limit(self) -> None:
        """FSDP1's limiter lets two gathered units be alive: with two on their way out the CPU waits for the older."""
        if len(self.resharded) > 1:
            older = self.resharded.pop(0)
            self.limited = {op: [older] for op in self.limited}  # who waits for it has waited for those before

    def once(self, lane: Lane, waits: list[Draft]) -> list[Draft]:
        """Those for which a lane has not waited yet."""
        new = [d for d in waits if (lane, id(d)) not in self.waited]
        self.waited.update((lane, id(d)) for d in new)
        return new

    def take_limited(self, op: Op) -> list[Draft]:
        """What the CPU waited for since it last issued such an operation."""
        found, self.limited[op] = self.limited[op], []
        return found

    def take_reductions(self) -> list[Draft]:
        """The last reductions, once: whoever comes later on the compute lane has waited with the first."""
        found = list(self.unwaited.values())
        self.unwaited.clear()
        return found

    def in_note(self, draft: Draft) -> bool:
        """Whether the one before it on its lane was issued by the same annotation, and so has waited already."""
        last = self.on_lane.get(draft.lane)
        return last is not None and last.note_start == draft.note_start

    def compute(self) -> Draft | None:
        return self.on_lane.get(Lane.COMPUTE)


def _fsdp2(draft: Draft, seen: _IssuedSoFar) -> list[Draft | None]:
    if draft.op in (*UNSHARDS, Op.ALL_GATHER):
        found: list[Draft | None] = []
        forward = (draft.state.step, draft.state.micro_batch)
        if draft.state.phase is not Phase.BACKWARD and seen.forward != forward:  # the root's: streams wait for compute
            if draft.op is Op.ALL_GATHER or not seen.in_note(draft):
                found += [seen.compute(), *seen.unwaited.values()]
            if draft.op is Op.ALL_GATHER:
                seen.forward = forward
                seen.copy_outs.clear()
        elif not seen.in_note(draft):
            behind = 1 if draft.state.phase is Phase.BACKWARD else 2
            found += seen.once(draft.lane, seen.copy_outs[-behind:][:1] if len(seen.copy_outs) >= behind else [])
        if draft.op is Op.ALL_GATHER:
            before = [seen.last.get((op, draft.unit)) for op in UNSHARDS]
            found += [d for d in before if d is not None and d.note_start == draft.note_start][-1:]
        return found
    if draft.op is Op.AG_COPY_OUT:
        reductions = seen.take_reductions() if draft.state.phase is Phase.FORWARD else []
        return [seen.last.get((Op.ALL_GATHER, draft.unit)), *reductions]
    if draft.op is Op.RS_COPY_IN:  # one input buffer at a time; the end of a backward waits for all
        return [d for d in seen.reduces[-1:] if d.state[-2:] == draft.state[-2:]]
    if draft.op in (Op.DIV, Op.REDUCE_SCATTER):
        return [] if seen.in_note(draft) else [seen.last.get((Op.RS_COPY_IN, draft.unit))]
    if draft.op is Op.ALL_REDUCE:
        return [seen.last.get((Op.REDUCE_SCATTER, draft.unit))]
    return _other(draft, seen)


def _fsdp1(draft: Draft, seen: _IssuedSoFar) -> list[Draft | None]:
    if draft.op is Op.ALL_GATHER:
        return [seen.last.get((Op.AG_CAST, draft.unit)), *seen.take_limited(draft.op)]
    if draft.op in UNSHARDS:
        return list(seen.take_limited(draft.op))
    if draft.op in (Op.FWD, Op.BWD, Op.RECOMPUTE):
        return [seen.last.pop((Op.ALL_GATHER, draft.unit), None)]  # the first that computes with what was gathered
    if draft.op in (Op.DIV, Op.REDUCE_SCATTER):
        return [] if seen.in_note(draft) else [seen.compute()]
    if draft.op is Op.ALL_REDUCE and draft.unit:
        return [seen.last.get((Op.REDUCE_SCATTER, draft.unit))]
    return _other(draft, seen)


def _other(draft: Draft, seen: _IssuedSoFar) -> list[Draft | None]:
    if draft.op is Op.OPTIM:
        return list(seen.take_reductions())
    return [seen.compute()] if draft.op is Op.ALL_REDUCE else []


def recorded_waits(
    drafts: Sequence[Draft], waits: Sequence[StreamWait], launched: dict[int, tuple[float, int]]
) -> dict[int, list[Draft]]:
    """By id of a draft those that its stream was told to wait for: the last on the other stream before the event was
    recorded, in the order of the CPU.
    """
    by_stream: dict[int, list[Draft]] = {}
    for draft in sorted(drafts, key=lambda d: d.issue):
        by_stream.setdefault(draft.stream, []).append(draft)
    found: dict[int, list[Draft]] = {}
    for wait in waits:
        called_at = launched.get(wait.correlation, (wait.at, 0))[0]
        recorded_at = launched.get(wait.record, (called_at, 0))[0]
        waiting = _from(by_stream, wait.stream, called_at)
        before = _until(by_stream, wait.on_stream, recorded_at)
        if waiting is not None and wait.stream != wait.on_stream:
            found.setdefault(id(waiting), []).extend(before)
    return found


def _from(by_stream: dict[int, list[Draft]], stream: int, time: float) -> Draft | None:
    """The first that was issued on a stream from a moment on."""
    issued = by_stream.get(stream, [])
    at = bisect_left(issued, time, key=lambda d: d.issue)
    return issued[at] if at < len(issued) else None


def _until(by_stream: dict[int, list[Draft]], stream: int, time: float) -> list[Draft]:
    """The last that was issued on a stream until a moment, if any."""
    issued = by_stream.get(stream, [])
    at = bisect_right(issued, time, key=lambda d: d.issue)
    return issued[at - 1 : at] if at else []
