"""A torch.profiler trace as a `Timeline`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fsdp_sim.timeline.clocks import aligned
from fsdp_sim.timeline.event import Event
from fsdp_sim.timeline.header import Header, HostWork
from fsdp_sim.timeline.kinds import Op
from fsdp_sim.timeline.kineto.cpu import cpu_drafts
from fsdp_sim.timeline.kineto.draft import Draft
from fsdp_sim.timeline.kineto.gpu import device_drafts
from fsdp_sim.timeline.kineto.host import Host
from fsdp_sim.timeline.kineto.memory import AllocatorChange, memory_changes
from fsdp_sim.timeline.kineto.names import host_work
from fsdp_sim.timeline.kineto.rows import TraceRows, read_rows
from fsdp_sim.timeline.kineto.stream import RECORD
from fsdp_sim.timeline.kineto.waits import derive_waits, recorded_waits
from fsdp_sim.timeline.limits import MAX_BYTES, Progress
from fsdp_sim.timeline.timeline import Timeline


def read_kineto(
    path: str | Path | Sequence[str | Path],
    *,
    rank: int | None = None,
    progress: Progress | None = None,
    max_bytes: int = MAX_BYTES,
) -> Timeline:
    """Read a trace of torch.profiler (torch 2.11 to 2.13): FSDP1, FSDP2 or DDP, on GPUs or CPUs, JSON or gzip.

    Args:
        path: what ``export_chrome_trace`` or ``tensorboard_trace_handler`` wrote on one rank; or several ranks' files,
            which become one timeline, their clocks aligned by what each says its zero is, and by collectives.
        rank: the rank of the trace, where the file does not say it.
        progress: called with bytes read and bytes in all, every few megabytes.
        max_bytes: how much is read of a file at most, unpacked; see `fsdp_sim.timeline.limits`.

    Returns:
        Operations as they ran. Kernels of one unit's forward (backward) are one event, or several where compute stood
        idle for communication (20 us or more); ``unlaunched_s`` says for how long it stood idle inside of one because
        the CPU had not launched the next kernel. Waits are those that the trace recorded (``enable_cuda_sync_events``),
        else those that FSDP's rules impose. What runs between the root's forward and its backward is the unit
        ``loss``; collectives that no annotation of FSDP issued have no unit. Sizes need ``record_shapes=True`` on
        CPUs, memory ``profile_memory=True``, names of FSDP1's units and source lines ``with_stack=True``.

    Raises:
        ValueError: the file is broken or no trace, or nothing in it is FSDP or a collective; the message says what to
            do.
        OSError: the file cannot be opened.
    """
    several = not isinstance(path, (str, Path))
    paths = [Path(p) for p in path] if several else [Path(path)]  # type: ignore[union-attr, arg-type]
    if not paths:
        raise ValueError("read_kineto was given an empty list of files; give the trace of at least one rank")
    if several and len(paths) > 1 and rank is not None:
        raise ValueError(f"rank={rank} names one rank, and {len(paths)} files were given; leave it out")
    reads = [_read(p, rank, share, max_bytes) for p, share in zip(paths, _shares(paths, progress), strict=True)]
    ranks = [r.rank for r in reads]
    if len(set(ranks)) < len(ranks):
        twice = next(r for r in ranks if ranks.count(r) > 1)
        raise ValueError(
            f"{', '.join(str(r.path) for r in reads if r.rank == twice)} are all of rank {twice}; "
            "give one file per rank"
        )
    base = min(r.base_ns for r in reads)
    origin_ns = min(r.first_us * 1e3 + (r.base_ns - base) for r in reads)
    events, host_work = [], []
    for r in reads:
        origin_us = (origin_ns - (r.base_ns - base)) / 1e3
        events += r.events(origin_us)
        host_work += r.host_work(origin_us)
    header = _header(reads, host_work)
    if base:  # else times count from no moment that is known
        header = msgspec.structs.replace(header, began_unix_s=(base + origin_ns) * 1e-9)
    return aligned(Timeline(header, events))


def _shares(paths: list[Path], progress: Progress | None) -> list[Progress | None]:
    """For each of several files a progress that counts the bytes of all."""
    if progress is None:
        return [None] * len(paths)
    sizes = [p.stat().st_size for p in paths]

    def share(before: int) -> Progress:
        return lambda done, _: progress(before + done, sum(sizes))

    return [share(sum(sizes[:i])) for i in range(len(sizes))]


class _TraceFile:
    """One file's operations, still on its own clock; what it was read from is let go."""

    def __init__(self, path: Path, rows: TraceRows, host: Host, drafts: list[Draft], rank: int) -> None:
        self.path, self.metadata, self.rank = path, rows.metadata, rank
        self.left_out, self.untimed = rows.left_out, rows.untimed
        self.of_graphs = sum(kernel.correlation in rows.graphs for kernel in rows.kernels)
        self.on_gpu = bool(rows.kernels)
        # Of one rank nothing is gathered: annotations say it. Of DDP and ZeRO the operations give it away.
        self.api = "fsdp1" if host.fsdp == 1 else "fsdp2" if host.fsdp else ""
        self.drafts = drafts
        self.memory = memory_changes(rows, host)
        self.work = [(what, span) for span in rows.annotations if (what := host_work(span.name))]
        self.base_ns = _int(rows.metadata.get("baseTimeNanoseconds"))
        self.first_us = min(min(d.issue, d.start) for d in drafts)

    def events(self, origin: float) -> list[Event]:
        """All events in the order of the CPU, in seconds from a moment on this file's clock."""
        merged: list[Draft | AllocatorChange] = sorted([*self.drafts, *self.memory], key=_issued)
        number = {id(item): seq for seq, item in enumerate(merged)}
        return [item.event(number[id(item)], self.rank, origin, number) for item in merged]

    def host_work(self, origin: float) -> list[HostWork]:
        """What the CPU did besides, in seconds from a moment on this file's clock."""
        return [
            HostWork(self.rank, what, (span.start - origin) * 1e-6, (span.end - origin) * 1e-6)
            for what, span in self.work
        ]


def _issued(item: Draft | AllocatorChange) -> float:
    return item.issue if isinstance(item, Draft) else item.at


def _read(path: Path, rank: int | None, progress: Progress | None, max_bytes: int) -> _TraceFile:
    rows = read_rows(path, progress, max_bytes=max_bytes)
    rows.keep_one_device()
    if lacking := _lacking(rows):
        raise ValueError(f"{path} {lacking}")
    host = Host(rows)
    drafts = device_drafts(rows, host) if rows.kernels else cpu_drafts(rows, host)
    if not host.fsdp and not any(d.is_collective for d in drafts):
        raise ValueError(f"{path} {_what_else(rows)}")
    drafts.sort(key=lambda d: (d.issue, d.start))
    if any(note.kind == "ddp_forward" for note in host.notes):
        _name_buckets(drafts, host)
    for draft in drafts:
        draft.calls = host.calls(draft.tid, draft.issue)
    recorded = recorded_waits(drafts, rows.waits, rows.launched) if rows.waits else None
    limiter = [note.start for note in host.notes if note.kind == "rate_limiter"]
    derive_waits(drafts, host.fsdp, limiter, recorded)
    return _TraceFile(path, rows, host, drafts, _rank(rows, path) if rank is None else rank)


def _name_buckets(drafts: list[Draft], host: Host) -> None:
    """Number DDP's all-reduces within each backward, as the simulator does; autograd's hooks issue them."""
    seen: Counter[tuple[int, int]] = Counter()
    for draft in drafts:
        if draft.op is Op.ALL_REDUCE and not draft.unit and host.in_autograd(draft.tid, draft.issue):
            backward = (draft.state.step, draft.state.micro_batch)
            draft.unit = f"bucket.{seen[backward]}"
            seen[backward] += 1


def _what_else(rows: TraceRows) -> str:
    if rows.names or rows.kernels:
        info = rows.metadata.get("distributedInfo")
        ranks = info.get("world_size") if isinstance(info, dict) else None
        what = "plain training on one device; record a step of the sharded model"
        if isinstance(ranks, int) and ranks > 1:
            what = (
                f"it says that there were {ranks} ranks, so nothing was exchanged in what was recorded, or by kernels "
                f"whose names are not known here (known are those of NCCL, RCCL, Gloo, NVSHMEM, DeepEP and torch's "
                f"symmetric memory); record whole steps"
            )
        return (
            f"is a trace of {len(rows.kernels):,} kernels and {len(rows.ops.start):,} CPU operations "
            f"without FSDP and without a collective: {what}"
        )
    if rows.count:
        return (
            f"is a list of {rows.count:,} events in Chrome's trace format that torch.profiler did not write; {RECORD}"
        )
    return f"has no events; the profiler was not active (see its schedule), or stopped early; {RECORD}"


def _lacking(rows: TraceRows) -> str:
    """What is missing where one side of a GPU run was not recorded; else empty."""
    info = rows.metadata.get("distributedInfo")
    nccl = isinstance(info, dict) and "nccl" in str(info.get("backend"))
    if not rows.kernels and (rows.launched or nccl) and not rows.gloo and rows.names:
        return f"has the CPU side of a run on GPUs and no kernels, so not when anything ran; {RECORD}"
    if rows.kernels and not rows.names:
        return f"has {len(rows.kernels):,} kernels and no CPU operations, so not what they were launched for; {RECORD}"
    return ""


def _rank(rows: TraceRows, path: Path) -> int:
    info = rows.metadata.get("distributedInfo")
    if isinstance(info, dict) and isinstance(info.get("rank"), int):
        return int(info["rank"])
    found = re.search(r"rank[_\-.]?(\d+)", path.name)
    return int(found.group(1)) if found else 0


def _header(reads: list[_TraceFile], work: list[HostWork]) -> Header:
    world = max([len(reads), *(_world(r) for r in reads)])
    metadata = reads[0].metadata
    properties = metadata.get("deviceProperties")
    devices = [d for d in properties if isinstance(d, dict)] if isinstance(properties, list) else []
    info = metadata.get("distributedInfo")
    versions = {
        name: str(value)
        for name, value in {
            "torch": metadata.get("torch_version") or metadata.get("pytorch_version"),
            "nccl": info.get("nccl_version") if isinstance(info, dict) else None,
            "cuda_runtime": metadata.get("cuda_runtime_version"),
            "cuda_driver": metadata.get("cuda_driver_version"),
        }.items()
        if value
    }
    device = devices[0] if devices else {}
    name = str(device.get("name") or ("CPU" if not reads[0].on_gpu else "GPU"))
    return Header(
        producer="torch.profiler", clock="measured", world_size=world, title=reads[0].path.name,
        hardware=f"{world} x {name}", versions=versions, api=reads[0].api,
        device="gpu" if reads[0].on_gpu else "cpu", memory_limit_bytes=_int(device.get("totalGlobalMem")),
        hosts={r.rank: host for r in reads if isinstance(host := r.metadata.get("host_name"), str)},
        host_work=tuple(work), left_out=tuple(sorted({device for r in reads for device in r.left_out})),
        of_graphs=sum(r.of_graphs for r in reads), untimed=sum(r.untimed for r in reads),
    )  # fmt: skip


def _world(read: _TraceFile) -> int:
    info: Any = read.metadata.get("distributedInfo")
    stated = _int(info.get("world_size")) if isinstance(info, dict) else 0
    return max(stated, read.rank + 1, *(d.group_size for d in read.drafts))


def _int(value: Any) -> int:
    return int(value) if isinstance(value, (int, float)) else 0
