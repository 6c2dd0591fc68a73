"""What is kept of a trace; the rest is dropped while the file is read.

Kept are annotations, CPU operations, launches, device work, waits, memory, modules and the user's Python frames. Times
are Kineto's microseconds. A row of the CPU side is a `Span` on a thread; CPU operations, by far the most, are kept as
columns of numbers.
"""

from __future__ import annotations

import re
import sys
import zlib
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fsdp_sim.timeline.kineto.repair import repaired
from fsdp_sim.timeline.kineto.stream import EventStream, Raw
from fsdp_sim.timeline.limits import MAX_BYTES, Progress

_FRAME = re.compile(r"(.+\.\w+)\((\d+)\): (.+)", re.DOTALL)


class Span(NamedTuple):
    """Something between two moments on a CPU thread."""

    start: float
    end: float
    tid: int
    name: str


class Args(msgspec.Struct, gc=False):
    """The arguments that are looked at, in Kineto's spelling; of any type, because traces differ."""

    external: Any = msgspec.field(name="External id", default=None)
    correlation: Any = None
    stream: Any = None
    device: Any = None
    forward_thread: Any = msgspec.field(name="Fwd thread id", default=None)
    sequence: Any = msgspec.field(name="Sequence number", default=None)
    collective: Any = msgspec.field(name="Collective name", default=None)
    in_nelems: Any = msgspec.field(name="In msg nelems", default=None)
    out_nelems: Any = msgspec.field(name="Out msg nelems", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dtype: Any = None
    process_group: Any = msgspec.field(name="Process Group Name", default=None)
    group_purpose: Any = msgspec.field(name="Process Group Description", default=None)
    group_ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    turn: Any = msgspec.field(name="Seq", default=None)
    input_type: Any = msgspec.field(name="Input type", default=None)
    input_dims: Any = msgspec.field(name="Input Dims", default=None)
    memcpy_bytes: Any = msgspec.field(name="bytes", default=None)
    alloc_bytes: Any = msgspec.field(name="Bytes", default=None)
    address: Any = msgspec.field(name="Addr", default=None)
    total_allocated: Any = msgspec.field(name="Total Allocated", default=None)
    device_type: Any = msgspec.field(name="Device Type", default=None)
    wait_on_stream: Any = None
    wait_on_record: Any = msgspec.field(name="wait_on_cuda_event_record_corr_id", default=None)


NO_ARGS = Args()


class Kernel(NamedTuple):
    """Work on a device: a kernel, a copy or a memset."""

    start: float
    end: float
    stream: int
    correlation: int
    name: str
    args: Args


class StreamWait(NamedTuple):
    """A ``cudaStreamWaitEvent`` with what it waited for (recorded with ``enable_cuda_sync_events=True``)."""

    at: float
    correlation: int  # of the call
    stream: int
    on_stream: int
    record: int  # correlation of the cudaEventRecord


class Alloc(NamedTuple):
    """A ``[memory]`` event: bytes taken (or, negative, given back) by the allocator of a device."""

    at: float
    tid: int
    bytes: int
    address: int
    total: int
    on_gpu: bool


class Ops(NamedTuple):
    """CPU operations as columns, sorted by start, those that contain others first."""

    start: Sequence[float]
    end: Sequence[float]
    tid: Sequence[int]
    name: Sequence[int]  # an index of `TraceRows.names`
    forward: Sequence[int]  # 1 where autograd recorded it


class TraceRows:
    """What one file holds, sorted by nothing.

    Attributes:
        metadata: the keys of the document beside its events. count: how many events it has.
        names: of CPU operations; `ops` says which have which.
        collectives: CPU operations of torch.distributed, with their arguments; gloo: its threads' spans.
        launched: where a correlation id was launched: (start, thread).
        graphs: the correlation ids of graphs, which launch many kernels at once.
        untimed: how many events have a time or a duration that is no number, or a negative duration.
        left_out: devices whose kernels are no longer among `kernels`.
        modules, frames: Python's calls of ``nn.Module`` and of the user's functions, these as ``file:line``.
    """

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.count = self.untimed = 0
        self.annotations: list[Span] = []
        self.gloo: list[tuple[Span, Args]] = []  # collectives on gloo's threads
        self.names: list[str] = []
        self.launched: dict[int, tuple[float, int]] = {}
        self.graphs: set[int] = set()
        self.kernels: list[Kernel] = []
        self.left_out: tuple[int, ...] = ()
        self.waits: list[StreamWait] = []
        self.collectives: list[tuple[Span, Args]] = []
        self.memory: list[Alloc] = []
        self.modules: list[Span] = []
        self.frames: list[Span] = []
        self._name_ids: dict[str, int] = {}
        self._op_start, self._op_end = array("d"), array("d")
        self._op_tid, self._op_name, self._op_external = array("q"), array("l"), array("q")
        self._forward = array("b")

    def keep_one_device(self) -> None:
        """Leave out all devices but the one with most kernels: a process that drives several is no rank, and their
        streams have the same numbers."""
        of = Counter(kernel.args.device for kernel in self.kernels if isinstance(kernel.args.device, int))
        if len(of) > 1:
            kept = max(sorted(of), key=of.__getitem__)
            self.left_out = tuple(sorted(of.keys() - {kept}))
            self.kernels = [kernel for kernel in self.kernels if kernel.args.device in (kept, None)]

    @cached_property
    def ops(self) -> Ops:
        """The CPU operations."""
        order = sorted(range(len(self._op_start)), key=self._op_end.__getitem__, reverse=True)
        order.sort(key=self._op_start.__getitem__)
        columns: tuple[array[Any], ...] = (self._op_start, self._op_end, self._op_tid, self._op_name, self._forward)
        return Ops(*(array(column.typecode, [column[i] for i in order]) for column in columns))

    @cached_property
    def _external(self) -> dict[int, tuple[float, int]]:
        return {
            e: (t, tid) for e, t, tid in zip(self._op_external, self._op_start, self._op_tid, strict=True) if e >= 0
        }

    @cached_property
    def _threads(self) -> set[int]:
        return set(self._op_tid)

    def issued(self, kernel: Kernel) -> tuple[float, int] | None:
        """When and on which thread a kernel was launched: by the call of the runtime, else by its CPU operation.

        The runtime may number threads otherwise than the operating system; then the operation says the thread.
        """
        call = self.launched.get(kernel.correlation)
        if call is not None and call[1] in self._threads:
            return call
        operation = self._external.get(kernel.args.external) if isinstance(kernel.args.external, int) else None
        return (call[0], operation[1]) if call and operation else operation or call

    @cached_property
    def _of_streams(self) -> dict[int, tuple[list[float], list[float]]]:
        """Of each stream the kernels whose launch is known: when they start, and when they were issued."""
        found: dict[int, tuple[list[float], list[float]]] = {}
        for kernel in sorted(self.kernels, key=lambda one: one.start):
            if (call := self.issued(kernel)) is not None:
                starts, issues = found.setdefault(kernel.stream, ([], []))
                starts.append(kernel.start)
                issues.append(call[0])
        return found

    def issued_about(self, kernel: Kernel) -> float:
        """When a kernel was issued whose launch is not known: after the one before it on its stream, which the CPU may
        have issued steps ahead of the device."""
        starts, issues = self._of_streams.get(kernel.stream, ([], []))
        at = bisect_right(starts, kernel.start)
        return issues[at - 1] if at else kernel.start

    def add_op(self, start: float, end: float, tid: int, name: str, forward: bool, external: int = -1) -> None:
        index = self._name_ids.get(name)
        if index is None:
            index = self._name_ids[name] = len(self.names)
            self.names.append(name)
        self._op_start.append(start)
        self._op_end.append(end)
        self._op_tid.append(tid)
        self._op_name.append(index)
        self._forward.append(forward)
        self._op_external.append(external)


_args = msgspec.json.Decoder(Args)


def read_rows(path: str | Path, progress: Progress | None = None, *, max_bytes: int = MAX_BYTES) -> TraceRows:
    """Read one file, at most ``max_bytes`` of it (unpacked).

    Raises:
        ValueError: the file is no trace, or broken.
    """
    rows = TraceRows()
    stream = EventStream(path, progress, max_bytes=max_bytes)
    for events in stream:
        for event in events:
            _take(rows, event)
    rows.metadata, rows.count = stream.metadata, stream.count
    return rows


def _take(rows: TraceRows, raw: Raw) -> None:
    take = _TAKERS.get((raw.ph, raw.cat)) if isinstance(raw.cat, str) and isinstance(raw.ph, str) else None
    if take is None or not isinstance(raw.name, str):
        return
    start, lasts = _number(raw.ts), _number(raw.dur) if raw.ph == "X" or raw.dur is not None else 0.0
    if start is None or lasts is None or lasts < 0:
        rows.untimed += 1
    if start is not None:
        take(rows, raw, Span(start, start + max(lasts or 0.0, 0.0), thread(raw.tid), raw.name))


def _take_op(rows: TraceRows, raw: Raw, span: Span) -> None:
    args = _args_of(raw)
    forward = args.sequence is not None and not args.forward_thread
    external = args.external if isinstance(args.external, int) and 0 <= args.external < 1 << 62 else -1
    rows.add_op(*span, forward, external)
    if span.name.startswith(("c10d::", "_c10d_functional::")) or span.name == "record_param_comms":
        rows.collectives.append((span, args))


def _take_op_or_annotation(rows: TraceRows, raw: Raw, span: Span) -> None:
    """Of a trace whose annotations have no category of their own: those of ``record_function`` name no namespace."""
    _take_op(rows, raw, span)
    if "::" not in span.name:
        _take_annotation(rows, raw, span)


def _take_python(rows: TraceRows, raw: Raw, span: Span) -> None:
    if span.name.startswith("nn.Module: "):
        rows.modules.append(span._replace(name=span.name.removeprefix("nn.Module: ")))
    elif source := _user_frame(span.name):
        rows.frames.append(span._replace(name=source))


def _take_launch(rows: TraceRows, raw: Raw, span: Span) -> None:
    correlation = _args_of(raw).correlation
    if isinstance(correlation, int):
        rows.launched[correlation] = (span.start, span.tid)
        if span.name.endswith("GraphLaunch"):  # CUDA's runtime and driver, and HIP
            rows.graphs.add(correlation)


def _take_kernel(rows: TraceRows, raw: Raw, span: Span) -> None:
    args = _args_of(raw)
    stream = thread(args.stream) if args.stream is not None else span.tid
    correlation = args.correlation if isinstance(args.correlation, int) else -1
    rows.kernels.append(Kernel(span.start, span.end, stream, correlation, sys.intern(span.name), args))


def _take_annotation(rows: TraceRows, raw: Raw, span: Span) -> None:
    rows.annotations.append(span)
    if span.name.startswith("gloo:"):
        rows.gloo.append((span, _args_of(raw)))


def _take_sync(rows: TraceRows, raw: Raw, span: Span) -> None:
    args = _args_of(raw)
    known = (args.correlation, args.stream, args.wait_on_stream, args.wait_on_record)
    if span.name == "Stream Wait Event" and all(isinstance(value, int) and value >= 0 for value in known):
        rows.waits.append(StreamWait(span.start, *known))


def _take_memory(rows: TraceRows, raw: Raw, span: Span) -> None:
    args = _args_of(raw)
    known = (args.alloc_bytes, args.address, args.total_allocated)
    if span.name == "[memory]" and all(isinstance(value, int) for value in known):
        rows.memory.append(Alloc(span.start, span.tid, *known, args.device_type not in (0, None)))


_TAKERS: dict[tuple[str, str], Callable[[TraceRows, Raw, Span], None]] = {
    ("X", "cpu_op"): _take_op,
    ("X", "python_function"): _take_python,
    ("X", "user_annotation"): _take_annotation,
    ("X", "cuda_sync"): _take_sync,
    ("i", "cpu_instant_event"): _take_memory,
    **{("X", cat): _take_launch for cat in ("cuda_runtime", "cuda_driver", "privateuse1_runtime", "xpu_runtime")},
    **{("X", cat): _take_kernel for cat in ("kernel", "gpu_memcpy", "gpu_memset")},
    # of earlier versions of torch, as TensorBoard's plugin still reads them (torch-tb-profiler 0.4.3, EventTypeMap)
    ("X", "Operator"): _take_op_or_annotation,
    ("X", "Runtime"): _take_launch,
    **{("X", cat): _take_kernel for cat in ("Kernel", "Memcpy", "Memset")},
}


def _args_of(raw: Raw) -> Args:
    if not raw.args:
        return NO_ARGS
    try:
        return _args.decode(raw.args)
    except UnicodeDecodeError:
        return _args.decode(repaired(bytes(raw.args)))
    except (msgspec.MsgspecError, RecursionError):
        return NO_ARGS  # args of another kind belong to an event of another kind


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e18 else None


def thread(value: Any) -> int:
    """A thread or stream as a number of at most 62 bits; one that has a name gets a number of its own."""
    if isinstance(value, str) and not value.lstrip("-").isdecimal():
        return zlib.crc32(value.encode()) | 1 << 61
    try:
        return int(value) & (1 << 62) - 1
    except (TypeError, ValueError):
        return 0


def _user_frame(name: str) -> str:
    """``file:line`` of a Python frame that is neither torch's nor the standard library's; else empty."""
    found = _FRAME.fullmatch(name)
    if not found:
        return ""
    file = found.group(1)
    top = re.split(r"[/\\.]", file.lstrip("/"))[0]
    foreign = file.startswith("<") or top == "torch" or top in sys.stdlib_module_names
    if foreign or "/torch/" in file or re.search(r"/lib/python3\.\d+/(?!site-packages)", file):
        return ""
    return sys.intern(f"{file}:{found.group(2)}")
