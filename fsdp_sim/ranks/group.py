"""A process group that tells the board what it does, and can be slowed down.

`WatchedGroup` is torch's own `ProcessGroup` with the same gloo backend inside: every collective, whoever issues it
(learner code, DTensor, torch's or our `fully_shard`), passes through here, is written on the board, and goes on to
torch. `install` puts it in the place of torch's class before `init_process_group` runs.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import sysconfig
import threading
import time
import zlib
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

import fsdp_sim
from fsdp_sim.ranks.board import Board, Record
from fsdp_sim.ranks.network import Network, Wire
from fsdp_sim.timeline import RECORDER, Op

# torch's method -> our word. Torch renamed the single-tensor ones; whichever this version has is wrapped.
METHODS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
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
}
OLD_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
RECORDED_AS = {
    "all_gather": Op.ALL_GATHER,
    "reduce_scatter": Op.REDUCE_SCATTER,
    "all_reduce": Op.ALL_REDUCE,
    "broadcast": Op.BROADCAST,
    "barrier": Op.BARRIER,
    "send": Op.SEND,
    "recv": Op.RECV,
}
PlainGroup = c10d.ProcessGroup  # before `install`

# Sizes may differ between ranks here (uneven splits, only the root passes a list), so they are not compared.
UNEVEN = {"alltoall", "all_to_all_single", "gather", "scatter", "barrier"}

_PATHS = sysconfig.get_paths()
# Frames in these folders are not the learner's code: the standard library, installed packages, this package.
NOT_LEARNERS = (_PATHS["stdlib"], _PATHS["purelib"], _PATHS["platlib"], torch.__path__[0], fsdp_sim.__path__[0])


class Context:
    """What the groups of this rank share; set once, by `install`."""

    board: Board
    rank: int
    wire: Wire
    serial: bool = False
    unfinished: queue.SimpleQueue[WatchedWork] = queue.SimpleQueue()


class Ticket(NamedTuple):
    """A collective between its record on the board and its handle."""

    index: int  # of the record
    record: Record
    seq: int  # of its event in the recorder
    own_event: bool  # whether the group opened that event, or its caller did (the mini-FSDP opens its own)


def call_site() -> tuple[str, str]:
    """Who issued the running collective: (unit, ``file:line`` of the nearest frame that is learner code).

    The unit is a `Recorder.label`, else the ``_module_fqn`` of the nearest parameter group on the stack: torch's
    FSDPParamGroup has it, and so has ours.
    """
    unit, source = RECORDER.unit, ""
    frame = sys._getframe(2)
    while frame is not None and not (unit and source):
        code = frame.f_code
        if not unit and code.co_varnames[:1] == ("self",):
            owner = frame.f_locals.get("self")
            fqn = getattr(type(owner), "__module__", "") and getattr(owner, "__dict__", {}).get("_module_fqn", 0)
            if fqn != 0:
                unit = fqn or "root"
        name = code.co_filename
        if not source and not name.startswith(NOT_LEARNERS) and not name.startswith(("<frozen", "<string>")):
            source = f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return unit, source


def tensors_in(args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors among (nested lists of) arguments."""
    found: list[torch.Tensor] = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found.extend(tensors_in(tuple(arg)))
    return found


def detail_of(op: str, args: tuple[Any, ...]) -> str:
    """Reduce op, root or peer: what must agree besides sizes."""
    if op in ("send", "recv"):
        return f"peer={args[1]}"
    options = args[-1] if args else None
    if op in ("all_reduce", "reduce_scatter", "reduce") and hasattr(options, "reduceOp"):
        return str(getattr(options.reduceOp, "op", options.reduceOp)).rpartition(".")[2]
    return f"root={options.rootRank}" if hasattr(options, "rootRank") else ""


class WatchedWork(c10d.Work):
    """The handle of a collective on the board. ``start_s`` and ``end_s`` are known once `wait` has returned."""

    def __init__(self, ticket: Ticket, inner: Any) -> None:
        super().__init__()
        self.ticket, self.inner = ticket, inner
        self.start_s = self.end_s = 0.0
        self._done = False
        self._lock = threading.RLock()
        self.finished_s = 0.0  # when gloo was done, if someone noticed before `wait`
        if ticket.record.is_collective:
            Context.unfinished.put(self)

    def wait(self, timeout: Any = None) -> bool:
        with self._lock:
            if not self._done:
                Context.board.wait_begins(Context.rank, self.ticket.index)
                self.inner.wait()
                self._finish()
                Context.board.wait_ends(Context.rank)
                self._done = True
        return True

    def _finish(self) -> None:
        """Learn when it ran, and hold the caller until the modelled wire is done with it."""
        record = self.ticket.record
        self.start_s, self.end_s = record.issue_s, record.issue_s + record.cost_s
        if record.is_collective:
            self.start_s, self.end_s = Context.wire.span(record)
        if (left_s := self.end_s - time.monotonic()) > 0:
            time.sleep(left_s)
        self.end_s = max(self.end_s, self.finished_s or time.monotonic())  # gloo itself may be slower than the wire
        if self.ticket.own_event:
            RECORDER.end(self.ticket.seq, start_s=self.start_s, end_s=self.end_s)

    def is_completed(self) -> bool:
        """Whether `wait` would return at once. With a slow network a peek takes the place of a wait."""
        if self._done or Context.wire.network is None:
            return self._done or self.inner.is_completed()
        if self.inner.is_completed():
            self.wait()
        return self._done

    def get_future(self) -> torch.futures.Future:
        if Context.wire.network is None:
            return self.inner.get_future()
        delayed: torch.futures.Future = torch.futures.Future()

        def complete() -> None:
            self.wait()
            delayed.set_result(self.inner.get_future().wait())

        threading.Thread(target=complete, daemon=True).start()
        return delayed

    def result(self) -> Any:
        return self.inner.result()


class WatchedGroup(c10d.ProcessGroup):
    """torch's process group, with every collective written on the board before it is issued.

    It passes collectives on to a plain group with the same backend rather than to its own base class: torch calls the
    base of a Python subclass with the interpreter lock held, and gloo may want that lock to finish another collective.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
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
        numel = max((t.numel() for t in tensors), default=0)
        if method in ("allgather", "reduce_scatter", "gather", "scatter"):  # lists: one tensor per rank
            numel *= len(ranks)
        n_bytes = numel * (tensors[0].element_size() if tensors else 0)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        unit, source = call_site()
        record = Record(
            op=op,
            unit=unit,
            detail=detail_of(op, args),
            dtype=dtype,
            source=source,
            numel=0 if method in UNEVEN else numel,
            group=zlib.crc32(self.group_name.encode()),
            group_seq=self._issued if op not in ("send", "recv") else -1,
            members=ranks,
            issue_s=time.monotonic(),
            cost_s=Context.wire.network.seconds(op, n_bytes, len(ranks)) if Context.wire.network else 0.0,
        )
        self._issued += record.is_collective
        index = Context.board.post(Context.rank, record)
        kind = RECORDED_AS.get(op, Op.OTHER)
        seq, own_event = RECORDER.collective(
            kind, unit, bytes=n_bytes, group_size=len(ranks), dtype=dtype, source=source, issue_s=record.issue_s
        )
        return Ticket(index, record, seq, own_event)


def _watched(method: str, name: str) -> Any:
    def call(self: WatchedGroup, *args: Any, **kwargs: Any) -> WatchedWork:
        ticket = self._announce(method, (*args, *kwargs.values()))
        work = WatchedWork(ticket, getattr(self._plain, name)(*args, **kwargs))
        if Context.serial:
            work.wait()
        return work

    return call


for _method in METHODS:
    _name = _method if hasattr(c10d.ProcessGroup, _method) else OLD_NAMES.get(_method, _method)
    setattr(WatchedGroup, _name, _watched(_method, _name))


def _note_ends() -> None:
    """Runs in a thread: notes when each collective is done, so that one that ends early is not drawn long."""
    while True:
        work = Context.unfinished.get()
        with contextlib.suppress(RuntimeError):
            work.inner.wait()
            work.finished_s = time.monotonic()
        del work


def install(board: Board, rank: int, network: Network | None, serial: bool) -> None:
    """Make every process group created from now on in this process a `WatchedGroup`."""
    Context.board, Context.rank, Context.serial = board, rank, serial
    Context.wire = Wire(board, rank, network)
    threading.Thread(target=_note_ends, daemon=True).start()
    c10d.ProcessGroup = WatchedGroup  # type: ignore[misc]
