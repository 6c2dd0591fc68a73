"""A process group that tells the board what it does, and can be slowed down.

`WatchedGroup` is torch's own `ProcessGroup` with the same gloo backend inside: every collective, whoever issues it
(learner code, DTensor, torch's or our `fully_shard`), passes through here, is written on the board, and goes on to
torch. `install` puts it in the place of torch's class before `init_process_group` runs.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fsdp_sim.ranks.board import RankBoard, Record
from fsdp_sim.ranks.network import Network, Wire
from fsdp_sim.ranks.work import Context, Ticket, WatchedWork, note_ends
from fsdp_sim.timeline import COLLECTIVES, RECORDER, Op, calls, dtype_name, learners_line

# torch's method -> our word. Torch renamed the single-tensor ones; whichever this version has is wrapped.
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv",
}
OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
RECORDED_AS = {op.lower(): op for op in COLLECTIVES}  # what has no `Op` of its own is recorded as another
PlainGroup = c10d.ProcessGroup  # before `install`

# Sizes may differ between ranks here (uneven splits, only the root passes a list), so they are not compared.
UNEVEN = {"alltoall", "all_to_all_single", "gather", "scatter", "barrier"}


def unit_on(frame: FrameType | None) -> str:
    """The unit of the running collective: a `Recorder.label`, else the ``_module_fqn`` of the nearest parameter group
    on the stack: torch's FSDPParamGroup has it, and so has ours."""
    unit = RECORDER.unit
    while frame is not None and not unit:
        if frame.f_code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            fqn = getattr(type(owner), "__module__", "") and getattr(owner, "__dict__", {}).get("_module_fqn", 0)
            if fqn != 0:
                unit = fqn or "root"
        frame = frame.f_back
    return unit


def tensors_in(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among (nested lists of) arguments."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(tensors_in(tuple(arg)))
    return found


def detail_of(method: str, args: tuple[Any, ...], members: Sequence[int]) -> str:
    """Reduce op, root, or peer and tag: what must agree besides sizes."""
    op = METHODS[method]
    if op in ("send", "recv"):
        peer, tag = ("any", args[1]) if method == "recv_anysource" else (members[args[1]], args[2])
        return f"peer={peer} tag={tag}" if tag else f"peer={peer}"
    options: Any = args[-1] if args else None
    if op in ("all_reduce", "reduce_scatter", "reduce") and hasattr(options, "reduceOp"):
        return str(getattr(options.reduceOp, "op", options.reduceOp)).rpartition(".")[2]
    return f"root={options.rootRank}" if hasattr(options, "rootRank") else ""


class WatchedGroup(c10d.ProcessGroup):
    """torch's process group, with every collective written on the board before it is issued.

    It passes collectives on to a plain group with the same backend rather than to its own base class: torch calls the
    base of a Python subclass with the interpreter lock held, and gloo may want that lock to finish another collective.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._plain = PlainGroup(store, rank, size)
        self._issued = 0  # collectives of this group so far

    def _register_backend(self, *args: Any) -> None:
        super()._register_backend(*args)
        self._plain._register_backend(*args)

    def _set_default_backend(self, *args: Any) -> None:
        super()._set_default_backend(*args)
        self._plain._set_default_backend(*args)

    def _announce(self, method: str, args: tuple[Any, ...]) -> Ticket:
        op = METHODS[method]
        tensors = tensors_in(args)
        ranks = tuple(dist.get_process_group_ranks(self))
        numel = max((sum(t.numel() for t in tensors_in((arg,))) for arg in args), default=0)  # all inputs or outputs
        if method in ("gather", "scatter"):  # where only the root has them all
            numel = len(ranks) * max(t.numel() for t in tensors)
        n_bytes = numel * (tensors[0].element_size() if tensors else 0)
        dtype = dtype_name(tensors[0].dtype) if tensors else ""
        frame = sys._getframe(1)
        unit, stack = unit_on(frame), calls(frame)
        record = Record(
            op=op,
            unit=unit,
            detail=detail_of(method, args, ranks),
            dtype=dtype,
            source=learners_line(stack),
            numel=0 if method in UNEVEN else numel,
            group=zlib.crc32(self.group_name.encode()),
            group_seq=self._issued if op not in ("send", "recv") else -1,
            members=ranks,
            issue_s=time.monotonic(),
            cost_s=Context.wire.network.seconds(op, n_bytes, len(ranks)) if Context.wire.network else 0.0,
        )
        self._issued += record.is_collective
        index = Context.board.post(Context.rank, record)
        seq, RECORDER.opened = RECORDER.opened, -1
        if own_event := seq < 0:
            seq = RECORDER.begin(
                RECORDED_AS.get(op, Op.OTHER), unit, bytes=n_bytes, group_size=len(ranks), dtype=dtype,
                issue_s=record.issue_s, stack=stack,
            )  # fmt: skip
        return Ticket(index, record, seq, own_event)

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        with Context.lock:
            ticket = self._announce("barrier", ())
        with Context.board.waiting(Context.rank, ticket.index):
            self._plain.monitored_barrier(*args, **kwargs)  # type: ignore[attr-defined]
        if ticket.own_event:
            RECORDER.end(ticket.seq)


def _watched(method: str, name: str) -> Any:
    def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> WatchedWork:
        with Context.lock:
            ticket = self._announce(method, (*args, *kwargs.values()))
        Context.wire.keep_up()
        work = WatchedWork(ticket, getattr(self._plain, name)(*args, **kwargs))
        if Context.serial:
            work.wait()
        os.sched_yield()  # where ranks share cores: let the others issue theirs before this one computes
        return work

    return call


for _method in METHODS:
    _name = _method if hasattr(c10d.ProcessGroup, _method) else OLD_NAMES.get(_method, _method)
    setattr(WatchedGroup, _name, _watched(_method, _name))


def install(board: RankBoard, rank: int, network: Network | None, serial: bool) -> None:
    """Make every process group created from now on in this process a `WatchedGroup`."""
    Context.board, Context.rank, Context.serial = board, rank, serial
    Context.wire = Wire(board, rank, network)
    threading.Thread(target=note_ends, daemon=True).start()
    c10d.ProcessGroup = WatchedGroup  # type: ignore[misc]
    c10d._new_group_with_tag = _announced(c10d._new_group_with_tag)


def _announced(new_group: Any) -> Any:
    """Creating a group is no collective, but its members wait for each other all the same, and torch wants every rank
    to take part, so it goes on the board like one."""

    @functools.wraps(new_group)
    def announced(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        everyone = tuple(range(dist.get_world_size()))
        group = tuple(everyone if ranks is None else ranks)
        among_themselves = kwargs.get("use_local_synchronization") or kwargs.get("pg_tag")
        members = tuple(sorted(group)) if among_themselves else everyone
        if Context.rank not in members:
            return new_group(ranks, *args, **kwargs)
        who = zlib.crc32(f"new_group {members}".encode())
        with Context.lock:
            Context.new_groups[who] += 1
            record = Record(
                op="new_group",
                unit="",
                detail=f"ranks={','.join(map(str, group))}",
                dtype="",
                source=learners_line(calls(sys._getframe(1))),
                numel=0,
                group=who,
                group_seq=Context.new_groups[who],
                members=members,
                issue_s=time.monotonic(),
                cost_s=0.0,
            )
            index = Context.board.post(Context.rank, record)
        with Context.board.waiting(Context.rank, index):
            return new_group(ranks, *args, **kwargs)

    return announced
