"""Device work of a trace to operations.

What a kernel is follows from the annotation that the CPU was in when it launched it; which part a stream plays follows
from what runs on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from fsdp_sim.timeline.kinds import COLLECTIVE_LANE, Lane, Op
from fsdp_sim.timeline.kineto.draft import Draft, intervals, joined, with_sizes
from fsdp_sim.timeline.kineto.groups import group_name, turn
from fsdp_sim.timeline.kineto.host import Host
from fsdp_sim.timeline.kineto.names import collective, dtype, is_collective_kernel, is_matmul, kernel_kind
from fsdp_sim.timeline.kineto.notes import Note
from fsdp_sim.timeline.kineto.rows import Args, Kernel, TraceRows

COMPUTE_OPS = {Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM, Op.OTHER}
COPIES = {Op.H2D, Op.D2H}


def device_drafts(rows: TraceRows, host: Host) -> list[Draft]:
    """The operations of a device, in no order, each with its lane."""
    sizes = sizes_by_launch(rows, host)
    drafts = [kernel_draft(kernel, rows, host, sizes) for kernel in rows.kernels]
    lanes = _lanes(drafts, rows.kernels, host.fsdp)
    for draft in drafts:
        draft.lane = lanes[draft.stream]
        if draft.op is Op.AG_CAST and host.fsdp == 1 and draft.lane is Lane.COMPUTE:  # inputs cast, views made
            draft.op, draft.unit = draft.state.op, draft.state.unit
            draft.key = (draft.op, draft.unit, draft.state.occurrence)
    communication = intervals(d for d in drafts if d.is_collective)
    by_lane: dict[Any, list[Draft]] = defaultdict(list)
    for draft in drafts:  # a lane is one stream, but for compute, which may use several at a time
        by_lane[draft.lane if draft.lane is Lane.COMPUTE else draft.stream].append(draft)
    out = [d for pieces in by_lane.values() for d in joined(pieces, communication, kernels=True)]
    with_sizes(out)
    return out


def kernel_draft(kernel: Kernel, rows: TraceRows, host: Host, sizes: dict[tuple[int, float], Args]) -> Draft:
    issue, tid = rows.issued(kernel) or (rows.issued_about(kernel), -1)
    issue = min(issue, kernel.start)  # clocks of CPU and device differ by microseconds
    state = host.state(issue)
    notes = host.note(tid, issue)
    ops = host.op_around(tid, issue) if notes or is_collective_kernel(kernel.name) else []
    op, note = _op(kernel, notes, ops)
    draft = Draft(op or state.op, state.unit, state, issue, kernel.start, kernel.end, tid, stream=kernel.stream)
    if note is not None:
        draft.unit, draft.note_start = note.unit, note.start
        draft.key = (draft.op, draft.unit, note.start)
    elif draft.is_collective or draft.op in COPIES:
        draft.unit = ""
        draft.key = (kernel.correlation, kernel.start)
    else:
        if draft.op is Op.BWD and host.recomputes(tid, issue):
            draft.op = Op.RECOMPUTE
        draft.key = (draft.op, draft.unit, state.occurrence)
        _sort(draft, kernel)
    if draft.is_collective or is_collective_kernel(kernel.name):
        draft.key = (kernel.correlation, kernel.start)
        args = (
            kernel.args
            if kernel.args.collective
            else sizes.get((tid, _enclosing_record(host, tid, issue)), kernel.args)
        )
        _describe(draft, args, rows.metadata)
    elif kernel.args.memcpy_bytes and draft.op in COPIES and isinstance(kernel.args.memcpy_bytes, int):
        draft.bytes = kernel.args.memcpy_bytes
    return draft


def _sort(draft: Draft, kernel: Kernel) -> None:
    match kernel_kind(kernel.name):
        case "matmul":
            draft.matmul = kernel.end - kernel.start
        case "attention":
            draft.attention = kernel.end - kernel.start


def _op(kernel: Kernel, notes: list[Note], ops: list[str]) -> tuple[Op | None, Note | None]:
    """What a kernel does, and the annotation that says so; None for what the unit itself computes."""
    note = next((note for note in notes if note.kind in _PARTS), None)
    if is_collective_kernel(kernel.name):
        kinds = (collective(name) for name in (kernel.name, kernel.args.collective, *ops))
        known = [kind for kind in kinds if kind is not None]
        # NCCL sends all that travels between two ranks with one kernel; who called it says what it was.
        return next((kind for kind in known if kind is not Op.OTHER), Op.OTHER), note
    to_device, to_host = "HtoD" in kernel.name, "DtoH" in kernel.name
    if note is None:
        return (Op.H2D if to_device else Op.D2H if to_host else None), None
    op: Op | None = _PARTS[note.kind]
    if note.kind in _GATHERS:
        copy_in = any("all_gather_copy_in" in name for name in ops)
        op = Op.H2D if to_device else Op.AG_COPY_IN if copy_in else Op.AG_CAST
    elif note.kind == "post_backward_reduce":
        op = Op.D2H if to_host else on_gradients(ops)
    return op, note


_GATHERS = {"all_gather", "forward_prefetch", "backward_prefetch", "pre_forward", "pre_backward"}
_PARTS = {  # what kernels of an annotation do, where that is one thing
    "all_gather": Op.AG_COPY_IN, "all_gather_copy_out": Op.AG_COPY_OUT, "post_backward_reduce": Op.GRAD_CAST,
    "post_backward_accumulate": Op.ACCUMULATE, "post_backward_reshard": Op.UPCAST, "post_forward": Op.CLONE,
    "optimizer": Op.OPTIM, "zero_grad": Op.OTHER, "inputs_to_device": Op.H2D,
    "forward_prefetch": Op.AG_CAST, "backward_prefetch": Op.AG_CAST, "pre_forward": Op.AG_CAST,
    "pre_backward": Op.AG_CAST,
}  # fmt: skip


def on_gradients(ops: list[str]) -> Op:
    """Which part of a reduction an operation is, by its name."""
    for name in ops:
        if "chunk_cat" in name or name == "aten::cat" or "constant_pad" in name:
            return Op.RS_COPY_IN
        if "div" in name or "mul" in name:
            return Op.DIV
        if "add" in name:
            return Op.ACCUMULATE
    return Op.GRAD_CAST


def sizes_by_launch(rows: TraceRows, host: Host) -> dict[tuple[int, float], Args]:
    """The arguments of ``record_param_comms`` by thread and start, for kernels that carry none."""
    return {(span.tid, span.start): args for span, args in rows.collectives if args.collective}


def _enclosing_record(host: Host, tid: int, time: float) -> float:
    for i in host.op_ids_around(tid, time):
        if host.op_names[host.ops.name[i]] == "record_param_comms":
            return host.ops.start[i]
    return -1.0


def _describe(draft: Draft, args: Args, metadata: dict[str, Any]) -> None:
    """Message, group and dtype of a collective, from the arguments that torch gives its kernel."""
    draft.dtype, item = dtype(args.dtype)
    nelems = args.out_nelems if draft.op is Op.ALL_GATHER else args.in_nelems
    draft.bytes = nelems * item if isinstance(nelems, int) else 0
    draft.group_size = args.group_size if isinstance(args.group_size, int) and args.group_size > 0 else 1
    draft.process_group, draft.turn = group_name(args, metadata), turn(args)
    draft.purpose = str(args.group_purpose or "")


def _lanes(drafts: list[Draft], kernels: list[Kernel], fsdp: int) -> dict[int, Lane]:
    """The part that each stream plays.

    Compute is where matrices are multiplied, or, where none are, where most time of kernels outside of FSDP is spent. A
    stream with collectives of one kind is theirs; with several kinds it is `Lane.OTHER_COMM`.
    """
    busy: dict[int, Counter[Op]] = defaultdict(Counter)
    annotated: Counter[int] = Counter()  # FSDP's streams come first where others do the same (tensor parallelism)
    matmul: Counter[int] = Counter()
    compute: Counter[int] = Counter()
    for draft, kernel in zip(drafts, kernels, strict=True):
        took = kernel.end - kernel.start
        busy[draft.stream][draft.op] += took  # type: ignore[assignment]
        if draft.note_start:
            annotated[draft.stream] += took  # type: ignore[assignment]
        if draft.op in COMPUTE_OPS and not draft.is_collective:
            compute[draft.stream] += took  # type: ignore[assignment]
            if is_matmul(kernel.name):
                matmul[draft.stream] += took  # type: ignore[assignment]
    main = next((stream for stream, _ in (matmul or compute).most_common(1)), None)
    taken: set[Lane] = {Lane.COMPUTE} if main is not None else set()
    lanes = {main: Lane.COMPUTE} if main is not None else {}
    for stream in sorted(busy, key=lambda s: (-annotated[s], -sum(busy[s].values()))):
        if stream in lanes:
            continue
        lane = _part(busy[stream], fsdp)
        if lane in taken and lane is not Lane.COMPUTE:
            lane = Lane.OTHER_COMM
        lanes[stream] = lane
        taken.add(lane)
    return lanes


def _part(busy: Counter[Op], fsdp: int) -> Lane:
    kinds = {op for op in busy if op in COLLECTIVE_LANE}
    if fsdp == 1 and kinds:
        if kinds == {Op.ALL_GATHER}:
            return Lane.UNSHARD
        if Op.REDUCE_SCATTER in kinds and Op.ALL_GATHER not in kinds:
            return Lane.POST_BACKWARD
        return Lane.ALL_REDUCE if kinds == {Op.ALL_REDUCE} else Lane.OTHER_COMM
    if len(kinds) == 1:
        return COLLECTIVE_LANE[kinds.pop()]
    if kinds:
        return Lane.OTHER_COMM
    if Op.AG_COPY_IN in busy or Op.AG_CAST in busy:
        return Lane.PRE_UNSHARD if fsdp == 1 else Lane.AG_COPY_IN
    most = busy.most_common(1)[0][0]
    return Lane.COMPUTE if most in COMPUTE_OPS - {Op.OTHER} else Lane.OTHER_COMM
