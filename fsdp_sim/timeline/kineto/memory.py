"""The allocator's events of a trace (``profile_memory=True``) as bytes alive by what they are for.

A trace says how many bytes were taken and given back, at which address, at which moment of the CPU. What for follows
from the annotation or the forward or backward that took them, and from when they were given back. What was alive
before the recording began (shards, optimizer state, whatever else) is one block without a category.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.kinds import Lane, Memory, Op
from fsdp_sim.timeline.kineto.host import Host, HostState
from fsdp_sim.timeline.kineto.notes import Note
from fsdp_sim.timeline.kineto.rows import Alloc, TraceRows

SMALL = 1e-4
"""Buffers under this part of the peak that live within one operation are left out: a trace has up to millions."""


class AllocatorChange(NamedTuple):
    """An ``alloc`` or a ``free``, in microseconds."""

    at: float
    op: Op
    category: Memory
    unit: str
    bytes: int
    state: HostState

    def event(self, seq: int, rank: int, origin: float, number: dict[int, int]) -> Event:
        at_s = (self.at - origin) * 1e-6
        return Event(
            seq=seq, rank=rank, op=self.op, lane=Lane.COMPUTE, unit=self.unit, step=self.state.step,
            micro_batch=self.state.micro_batch, phase=self.state.phase, bytes=self.bytes, category=self.category,
            issue_s=at_s, start_s=at_s, end_s=at_s,
        )  # fmt: skip


class _Block(NamedTuple):
    taken: Alloc
    given_back: float  # infinity where it outlives the recording


def memory_changes(rows: TraceRows, host: Host) -> list[AllocatorChange]:
    """What is taken and given back on the device that computes, in time; empty where the trace has no memory."""
    events = sorted((e for e in rows.memory if e.on_gpu == bool(rows.kernels)), key=lambda e: e.at)
    if not events:
        return []
    base = max(events[0].total - events[0].bytes, 0)
    peak = max(max(e.total for e in events), 1)
    wires = {span.tid for span, _ in rows.gloo}
    changes = [_change(events[0].at, Op.ALLOC, Memory.NONE, "", base, host)] if base else []
    open_: dict[int, Alloc] = {}
    blocks: list[_Block] = []
    for event in events:
        if event.bytes >= 0:
            if lost := open_.get(event.address):  # given back without a record
                blocks.append(_Block(lost, event.at))
            open_[event.address] = event
        elif taken := open_.pop(event.address, None):
            blocks.append(_Block(taken, event.at))
        elif base:  # from before the recording
            base -= min(-event.bytes, base)
            changes.append(_change(event.at, Op.FREE, Memory.NONE, "", -event.bytes, host))
    blocks += [_Block(taken, float("inf")) for taken in open_.values()]
    firsts = _first_in_note(blocks, host)
    for block in blocks:
        category, unit = _purpose(block, host, wires, firsts)
        taken = block.taken
        if not taken.bytes or (category is Memory.TEMPORARY and taken.bytes < SMALL * peak):
            continue
        changes.append(_change(taken.at, Op.ALLOC, category, unit, taken.bytes, host))
        if block.given_back < float("inf"):
            changes.append(_change(block.given_back, Op.FREE, category, unit, taken.bytes, host))
    return sorted(changes, key=lambda change: change.at)


def _change(at: float, op: Op, category: Memory, unit: str, n_bytes: int, host: Host) -> AllocatorChange:
    return AllocatorChange(at, op, category, unit, n_bytes, host.state(at))


def _first_in_note(blocks: list[_Block], host: Host) -> set[Alloc]:
    """Of each annotation that reduces gradients the first block: the input of the reduce-scatter."""
    by_note: dict[Note, list[Alloc]] = defaultdict(list)
    for block in blocks:
        for note in host.note(block.taken.tid, block.taken.at):
            if note.kind == "post_backward_reduce":
                by_note[note].append(block.taken)
    return {min(taken, key=lambda alloc: alloc.at) for taken in by_note.values()}


def _purpose(block: _Block, host: Host, wires: set[int], firsts: set[Alloc]) -> tuple[Memory, str]:
    taken = block.taken
    state = host.state(taken.at)
    if taken.tid in wires:
        return Memory.TEMPORARY, state.unit
    for note in host.note(taken.tid, taken.at):
        within = block.given_back <= note.end
        if note.kind == "all_gather":
            return (Memory.TEMPORARY if within else Memory.AG_OUTPUT), note.unit
        if note.kind == "all_gather_copy_out":
            return (Memory.TEMPORARY if within else Memory.UNSHARDED), note.unit
        if note.kind == "post_backward_reduce":
            return (Memory.RS_INPUT if taken in firsts else Memory.RS_OUTPUT), note.unit
        if note.kind == "optimizer":
            return (Memory.TEMPORARY if within else Memory.OPTIMIZER), ""
        if note.kind in ("pre_forward", "forward_prefetch", "pre_backward", "backward_prefetch") and host.fsdp == 1:
            return Memory.UNSHARDED, note.unit
    if block.given_back < float("inf") and host.state(block.given_back) == state:
        return Memory.TEMPORARY, state.unit
    if state.op in (Op.FWD, Op.RECOMPUTE):
        return Memory.ACTIVATION, state.unit
    if state.op is Op.BWD:
        kept = any(note.kind.startswith("post_backward") for note in host.note(taken.tid, block.given_back))
        return (Memory.UNSHARDED_GRAD if kept else Memory.TEMPORARY), state.unit
    return Memory.TEMPORARY, state.unit
