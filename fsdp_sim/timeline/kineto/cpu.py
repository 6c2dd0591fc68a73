"""A trace without a device to operations: the thread that trains is the compute lane, gloo's threads are the wires.

On CPUs nothing is queued: copies and casts run on the thread that trains, and a collective is what gloo's thread did
between taking it and finishing it (its span ``gloo:…``), issued when the training thread called torch.distributed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from math import prod
from typing import Any

from fsdp_sim.timeline.kinds import COLLECTIVE_LANE, Lane, Op
from fsdp_sim.timeline.kineto.draft import Draft, intervals, joined, with_sizes
from fsdp_sim.timeline.kineto.gpu import on_gradients
from fsdp_sim.timeline.kineto.host import Host
from fsdp_sim.timeline.kineto.names import collective, dtype
from fsdp_sim.timeline.kineto.notes import Note
from fsdp_sim.timeline.kineto.rows import Args, TraceRows

CASTS = ("aten::_foreach_copy_", "aten::_to_copy", "aten::copy_")
GLOO_OR_PADDING = ("c10d::", "aten::copy_", "aten::constant_pad")  # gloo copies its part out of the reduced whole
FSDP1_LANES = {Op.ALL_GATHER: Lane.UNSHARD, Op.REDUCE_SCATTER: Lane.POST_BACKWARD}


def cpu_drafts(rows: TraceRows, host: Host) -> list[Draft]:
    """The operations of a CPU rank, in no order, each with its lane."""
    collectives = _collectives(rows, host)
    wires = {span.tid for span in rows.annotations if span.name.startswith("gloo:")}
    work = [_optimizer(note, host) for note in host.notes if note.kind == "optimizer"] + _parts(host, wires)
    # Who waits for DDP's last buckets does so between operations; FSDP's hooks wait in theirs, which are annotated.
    waited_for = None if host.fsdp else intervals(collectives)
    compute = joined([*_computed(host, wires), *work], waited_for)
    out = [*collectives, *compute]
    with_sizes(out)
    return out


def _collectives(rows: TraceRows, host: Host) -> list[Draft]:
    """Each call of torch.distributed with the time that gloo needed for it."""
    gloo = sorted(rows.gloo, key=lambda served: served[0].start)
    world = _world(rows.metadata)
    drafts, at, outermost = [], 0, -1.0
    for span, args in sorted(rows.collectives, key=lambda call: (call[0].start, -call[0].end)):
        op = collective(span.name.partition("::")[2])
        if op is None or span.end <= outermost:
            continue
        outermost, called_with = span.end, args
        notes = [n for n in host.note(span.tid, span.start) if n.unit]
        while at < len(gloo) and gloo[at][0].start < span.start:  # taken before the recording began
            at += 1
        if at < len(gloo):
            start, end, args = *gloo[at][0][:2], gloo[at][1]
            at += 1
        else:
            start, end = span.start, max(span.end, notes[0].end if notes else span.end)
        draft = Draft(op, notes[0].unit if notes else "", host.state(span.start), span.start, start, end, span.tid)
        draft.note_start = notes[0].start if notes else 0.0
        draft.lane = COLLECTIVE_LANE.get(op, Lane.OTHER_COMM)
        if host.fsdp == 1:
            draft.lane = FSDP1_LANES.get(op, draft.lane)
        draft.key = (span.start,)
        draft.group_size = _group_size(called_with) or world
        _describe(draft, args)
        drafts.append(draft)
    shards = max((d.group_size for d in drafts if d.op in FSDP1_LANES), default=world)
    if shards < world:
        for draft in drafts:
            if draft.op is Op.ALL_REDUCE:  # HSDP's is among the replicas; of others, the call does not say among whom
                draft.group_size = world // shards if draft.unit else 1
    return drafts


def _group_size(args: Args) -> int:
    """The ranks of a collective whose call names the whole and a rank's part of it (``record_shapes=True``), else 0."""
    dims = args.input_dims
    if not isinstance(dims, list) or len(dims) < 2:
        return 0
    part, whole = sorted(map(_numel, dims[:2]))
    return whole // part if part else 0


def _describe(draft: Draft, args: Args) -> None:
    """Message and dtype from the shapes that gloo was given (``record_shapes=True``); else they stay unknown.

    Gloo gathers from its input, and reduces (a reduce-scatter is its all-reduce) its input as a whole.
    """
    if isinstance(args.input_dims, list) and isinstance(args.input_type, list) and args.input_type:
        draft.dtype, item = dtype(args.input_type[0])
        draft.bytes = _numel(args.input_dims) * item * (draft.group_size if draft.op is Op.ALL_GATHER else 1)


def _numel(dims: Any) -> int:
    if not isinstance(dims, list):
        return 0
    if any(isinstance(d, list) for d in dims):
        return sum(map(_numel, dims))
    return prod(d for d in dims if isinstance(d, int)) if dims else 0


def _world(metadata: dict[str, Any]) -> int:
    info = metadata.get("distributedInfo")
    world = info.get("world_size") if isinstance(info, dict) else None
    return world if isinstance(world, int) and world > 0 else 1


def _optimizer(note: Note, host: Host) -> Draft:
    state = host.state(note.start)
    key = (Op.OPTIM, note.start)
    return Draft(Op.OPTIM, "", state, note.start, note.start, note.end, note.tid, key=key)


def _parts(host: Host, wires: set[int]) -> list[Draft]:
    """FSDP's copies and casts, each under the annotation of its unit."""
    out: list[Draft] = []
    ended, calls = -1.0, 0  # of torch.distributed, for which the thread waits: what is before and after is apart
    ops = host.ops
    for i in host.telling:
        start, end, tid = ops.start[i], ops.end[i], ops.tid[i]
        note = next((n for n in host.note(tid, start) if n.unit), None)
        name = host.op_names[ops.name[i]]
        if name.startswith("c10d::") and end > ended:
            ended, calls = end, calls + 1
        op = _part(note.kind, name) if note and tid not in wires and end > ended else None
        if op is None or note is None:
            continue
        ended = end  # what it consists of does not count again
        key = (op, note.start, calls)
        out.append(Draft(op, note.unit, host.state(start), start, start, end, tid, key=key, note_start=note.start))
    return out


def _part(kind: str, name: str) -> Op | None:
    """What an operation within an annotation does to shards or gradients."""
    if kind == "all_gather":
        return Op.AG_COPY_IN if "copy_in" in name else Op.AG_CAST if name in CASTS else None
    if kind == "all_gather_copy_out":
        return Op.AG_COPY_OUT if "split_with_sizes_copy" in name else None
    if kind == "post_backward_reduce" and not name.startswith(GLOO_OR_PADDING):
        return on_gradients([name])
    return None


def _computed(host: Host, wires: set[int]) -> list[Draft]:
    """What threads computed outside of FSDP's annotations: the outermost operations that contain none of them."""
    out: list[Draft] = []
    ops = host.ops
    of_thread: dict[int, list[int]] = defaultdict(list)
    for i, tid in enumerate(ops.tid):
        of_thread[tid].append(i)
    for tid in sorted(of_thread.keys() - wires):
        ended = -1.0
        for i, before in _outside_notes(host, tid, of_thread[tid]):
            start, end = ops.start[i], ops.end[i]
            if end <= ended:
                continue  # within an operation that counts already
            ended = end
            state = host.state(start)
            op = Op.RECOMPUTE if state.op is Op.BWD and ops.forward[i] else state.op
            if op is not Op.OPTIM:
                key = (op, state.unit, state.occurrence, before)
                out.append(Draft(op, state.unit, state, start, start, end, tid, key=key))
    return out


def _outside_notes(host: Host, tid: int, mine: list[int]) -> Iterator[tuple[int, int]]:
    """Operations of a thread that neither lie in an annotation nor contain one, and how many came before each.

    Left out as well: what contains a forward that backward runs again, and calls of torch.distributed.

    Args:
        mine: indices of the operations of the thread, ascending.
    """
    ops = host.ops
    notes = [note for note in host.notes if note.tid == tid and note.kind not in ("step", "ddp_forward")]
    starts = [note.start for note in notes]
    covered_until = list(accumulate((note.end for note in notes), max, initial=-1.0))
    forward = [ops.start[i] for i in mine if ops.forward[i]]
    backward = {i for i, name in enumerate(host.op_names) if name.startswith("autograd::") or "Backward" in name}
    calls = host.named("c10d::")
    called_until = -1.0
    for i in mine:
        start, end, name = ops.start[i], ops.end[i], ops.name[i]
        if name in calls:
            called_until = max(called_until, end)
        before = bisect_right(starts, start)
        if start < max(covered_until[before], called_until) or bisect_left(starts, end) > before:
            continue
        if name in backward and bisect_left(forward, end) > bisect_right(forward, start):
            continue
        yield i, before
