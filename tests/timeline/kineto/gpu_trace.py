"""A generator of GPU traces, for tests alone: what Kineto would have written had a simulated step run on GPUs.

No trace of FSDP on GPUs is kept here, so the reader's GPU side is tested against this: a `Timeline` is written out in
Kineto's format (annotations and operations on CPU threads, ``cudaLaunchKernel`` with correlation ids, kernels on
numbered streams with NCCL's arguments, flows, metadata), and reading it has to give the timeline back. It shows that
the reader understands the format as described, not that the format is described rightly; the names of fields are those
in the format strings of Kineto in the CUDA builds of torch 2.12.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from fsdp_sim.timeline import Event, Lane, Op, Phase, Timeline
from fsdp_sim.timeline.kinds import COLLECTIVES

PID, MAIN, AUTOGRAD = 4242, 4242, 4399
EPS = 0.25  # microseconds on the CPU around a launch
ZERO_US = 4417555131.0
STREAMS = {  # arbitrary: a reader must not know them
    Lane.COMPUTE: 7, Lane.AG_COPY_IN: 29, Lane.ALL_GATHER: 33, Lane.REDUCE_SCATTER: 37, Lane.ALL_REDUCE: 41,
    Lane.UNSHARD: 33, Lane.PRE_UNSHARD: 29, Lane.POST_BACKWARD: 37, Lane.OTHER_COMM: 45,
}  # fmt: skip
NCCL = {  # kernel, and the name that torch gives the collective
    Op.ALL_GATHER: ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    Op.REDUCE_SCATTER: (
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_reduce_scatter_base"),
    Op.ALL_REDUCE: ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
}  # fmt: skip
DTYPES = {"bf16": ("BFloat16", 2), "fp32": ("Float", 4), "fp16": ("Half", 2)}
CPU_OPS = {
    Op.AG_COPY_IN: "fsdp::all_gather_copy_in", Op.AG_COPY_OUT: "fsdp::split_with_sizes_copy",
    Op.AG_CAST: "aten::_foreach_copy_",
    Op.RS_COPY_IN: "fsdp::chunk_cat", Op.DIV: "aten::div_", Op.GRAD_CAST: "aten::_to_copy", Op.ACCUMULATE: "aten::add_",
    Op.ALL_GATHER: "c10d::_allgather_base_", Op.REDUCE_SCATTER: "c10d::_reduce_scatter_base_",
    Op.ALL_REDUCE: "c10d::allreduce_", Op.FWD: "aten::mm", Op.BWD: "aten::mm", Op.RECOMPUTE: "aten::mm",
}  # fmt: skip
KERNELS = {
    Op.FWD: "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", Op.BWD: "sm90_xmma_gemm_bf16bf16_bf16f32_f32_nt_n",
    Op.H2D: "Memcpy HtoD (Pinned -> Device)", Op.D2H: "Memcpy DtoH (Device -> Pinned)",
}  # fmt: skip
GATHER = (Op.H2D, Op.AG_CAST, Op.AG_COPY_IN, Op.ALL_GATHER)
REDUCE = (Op.RS_COPY_IN, Op.DIV, Op.REDUCE_SCATTER, Op.ALL_REDUCE, Op.GRAD_CAST, Op.ACCUMULATE, Op.D2H)


def kineto_trace(
    timeline: Timeline,
    *,
    rank: int = 0,
    api: str = "fsdp2",
    pieces: int = 3,
    recorded_waits: bool = False,
    parts: Callable[[Event], list[tuple[str, float, float]]] | None = None,
) -> dict[str, Any]:
    """The trace of one rank of a simulated timeline, as the object that ``json.dump`` writes.

    Args:
        api: ``fsdp2`` or ``fsdp1``, whose annotations to write.
        pieces: kernels of one unit's forward or backward.
        parts: of a unit's forward or backward: for each kernel its name, and where in the operation it begins and ends,
            as fractions; instead of equal pieces.
        recorded_waits: write the waits too, as ``enable_cuda_sync_events=True`` does.
    """
    writer = _Writer([e for e in timeline.ops if e.rank == rank], pieces, parts)
    writer.kernels()
    (writer.fsdp2 if api == "fsdp2" else writer.fsdp1)()
    writer.steps()
    if recorded_waits:
        writer.waits()
    world = timeline.header.world_size
    return {
        "schemaVersion": 1,
        "deviceProperties": [
            {"id": rank, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85021163520, "computeMajor": 9,
             "numSms": 132}
        ],
        "cuda_runtime_version": 12080, "cuda_driver_version": 12080, "trace_id": "5C1E", "displayTimeUnit": "ms",
        "distributedInfo": {
            "backend": "nccl", "rank": rank, "world_size": world, "pg_count": 1, "nccl_version": "2.27.3",
            "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": list(range(world))}],
        },
        "baseTimeNanoseconds": 1790857026000000000,
        "traceEvents": writer.events,
        "traceName": f"rank{rank}.json",
    }  # fmt: skip


def unit_names(timeline: Timeline) -> set[str]:
    """The units that are gathered; what else computes belongs to the root."""
    return {e.unit for e in timeline.ops if e.op is Op.ALL_GATHER}


class _Writer:
    def __init__(
        self, ops: list[Event], pieces: int, parts: Callable[[Event], list[tuple[str, float, float]]] | None
    ) -> None:
        self.parts = parts
        self.ops = ops
        self.pieces = pieces
        self.units = {e.unit for e in ops if e.op is Op.ALL_GATHER}
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "ts": ZERO_US, "pid": PID, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_labels", "ts": ZERO_US, "pid": 0, "tid": 0, "args": {"labels": "GPU 0"}},
        ]
        self._ids = itertools.count(1000)
        self._correlation: dict[int, int] = {}

    # ---- device work and what launched it ----

    def kernels(self) -> None:
        for e in self.ops:
            if self.parts and e.op in (Op.FWD, Op.BWD, Op.RECOMPUTE):
                parts = self.parts(e)
                for k, (name, begins, ends) in enumerate(parts):
                    took, issue = e.end_s - e.start_s, _us(e.issue_s) + k * EPS / (4 * len(parts))
                    start, dur = _us(e.start_s + begins * took), _us((ends - begins) * took, 0.0)
                    self._kernel(e, issue, start, dur, EPS / (16 * len(parts)), name)
                continue
            pieces = self.pieces if e.op in (Op.FWD, Op.BWD, Op.RECOMPUTE, Op.OPTIM) else 1
            for k in range(pieces):
                took = (e.end_s - e.start_s) / pieces
                issue = _us(e.issue_s) + k * EPS / (4 * pieces)
                self._kernel(e, issue, _us(e.start_s + k * took), _us(took, 0.0), EPS / (16 * pieces))

    def _kernel(self, e: Event, issue: float, start: float, dur: float, around: float, named: str = "") -> None:
        correlation = next(self._ids)
        self._correlation[e.seq] = correlation
        tid, stream = self._tid(e), STREAMS[e.lane]
        name = CPU_OPS.get(e.op, "aten::_fused_adamw_")
        autograd = {"Sequence number": correlation, "Fwd thread id": 0} if e.op in (Op.FWD, Op.RECOMPUTE) else {}
        self._cpu(name, issue - around, issue + around, tid, cat="cpu_op", external=correlation, **autograd)
        args: dict[str, Any] = {
            "External id": correlation, "queued": 0, "device": 0, "context": 1, "stream": stream,
            "correlation": correlation,
            "registers per thread": 96, "shared memory": 83248, "blocks per SM": 0.18, "grid": [24, 1, 1],
            "block": [512, 1, 1],
        }  # fmt: skip
        kernel, cat = named or KERNELS.get(e.op, "void at::native::vectorized_elementwise_kernel<4>(int)"), "kernel"
        if e.op in COLLECTIVES:
            kernel, called = NCCL[e.op]
            word, item = DTYPES[e.dtype]
            whole, part = e.bytes // item, e.bytes // item // e.group_size
            sizes = {Op.ALL_GATHER: (part, whole), Op.REDUCE_SCATTER: (whole, part)}.get(e.op, (whole, whole))
            described = {
                "Collective name": called, "In msg nelems": sizes[0], "Out msg nelems": sizes[1],
                "Group size": e.group_size,
                "dtype": word, "Process Group Name": "1" if e.op is Op.ALL_REDUCE else "0",
                "Process Group Description": "mesh_shard",
                "In split size": "[]", "Out split size": "[]",
            }  # fmt: skip
            args |= described
            self._cpu("record_param_comms", issue - around / 2, issue + around / 2, tid, cat="cpu_op", **described)
        elif e.op in (Op.H2D, Op.D2H):
            cat, args["bytes"] = "gpu_memcpy", e.bytes
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "pid": PID, "tid": tid, "ts": issue}
        self.events += [
            launch | {"dur": around / 4, "args": {"External id": correlation, "cbid": 430, "correlation": correlation}},
            {"ph": "s", "id": correlation, "pid": PID, "tid": tid, "ts": issue, "cat": "ac2g", "name": "ac2g"},
            {"ph": "f", "id": correlation, "pid": 0, "tid": stream, "ts": start, "cat": "ac2g", "name": "ac2g",
             "bp": "e"},
            {"ph": "X", "cat": cat, "name": kernel, "pid": 0, "tid": stream, "ts": start, "dur": dur, "args": args},
        ]  # fmt: skip

    def waits(self) -> None:
        """``cuda_sync`` events: before an operation is launched, its stream waits for events recorded on others."""
        by_seq = {e.seq: e for e in self.ops}
        for e in self.ops:
            for n, other in enumerate(by_seq[seq] for seq in e.waits_on if seq in by_seq):
                record, call = next(self._ids), next(self._ids)
                at = _us(e.issue_s) - EPS * 0.7 - n * EPS / 100
                after = _us(other.issue_s) + EPS / 2
                self.events += [
                    {"ph": "X", "cat": "cuda_runtime", "name": "cudaEventRecord", "pid": PID, "tid": self._tid(e),
                     "ts": after,
                     "dur": 0.01, "args": {"cbid": 135, "correlation": record}},
                    {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamWaitEvent", "pid": PID, "tid": self._tid(e),
                     "ts": at,
                     "dur": 0.0, "args": {"cbid": 147, "correlation": call}},
                    {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "pid": 0, "tid": STREAMS[e.lane],
                     "ts": at + 0.001, "dur": 0.0, "args": {
                        "wait_on_stream": STREAMS[other.lane], "wait_on_cuda_event_record_corr_id": record,
                        "wait_on_cuda_event_id": n, "cuda_sync_kind": "Stream Wait Event", "stream": STREAMS[e.lane],
                        "correlation": call, "device": 0, "context": 1}},
                ]  # fmt: skip

    # ---- annotations ----

    def steps(self) -> None:
        for step in sorted({e.step for e in self.ops}):
            inside = [_us(e.issue_s) for e in self.ops if e.step == step]
            self._cpu(f"ProfilerStep#{step}", min(inside) - 30 * EPS, max(inside) + 20 * EPS, MAIN)
        for e in self.ops:
            if e.op is Op.OPTIM:
                self._cpu("Optimizer.step#AdamW.step", _us(e.issue_s) - 2 * EPS, _us(e.issue_s) + 2 * EPS, MAIN)
            if e.op in (Op.BWD, Op.RECOMPUTE):
                at = _us(e.issue_s)
                self._cpu(
                    "autograd::engine::evaluate_function: MmBackward0", at - EPS / 2, at + EPS, AUTOGRAD, cat="cpu_op"
                )

    def fsdp2(self) -> None:
        for run in self._runs(GATHER):
            self._around("FSDP::all_gather", run[0].unit, run)
        for run in self._runs(REDUCE):
            at = _us(run[0].issue_s)
            self._cpu(_named("FSDP::post_backward_accumulate", run[0].unit), at - 3 * EPS, at - 2 * EPS, AUTOGRAD)
            self._around("FSDP::post_backward_reduce", run[0].unit, run)
        for run in self._runs((Op.UPCAST,)):
            self._around("FSDP::post_backward_reshard", run[0].unit, run)
        opened: set[tuple[object, ...]] = set()
        for e, after in itertools.zip_longest(self.ops, self.ops[1:]):
            at = _us(e.issue_s)
            unit = e.unit if e.unit in self.units else "root"
            if e.op is Op.AG_COPY_OUT:
                self._around("FSDP::all_gather_copy_out", unit, [e])
            if e.op in (Op.FWD, Op.BWD, Op.RECOMPUTE):
                kind = "forward" if e.op is Op.FWD else "backward"
                before = self._ahead_of(e)
                own = [o for o in before if o.unit == unit]
                inside = own if e.op is Op.FWD else before
                if (e.step, e.micro_batch, kind, unit) not in opened:
                    start = _us(inside[0].issue_s) if inside else at - 4 * EPS
                    end = _us(inside[-1].issue_s) if inside else at - 4 * EPS
                    self._cpu(_named(f"FSDP::pre_{kind}", unit), start - 2 * EPS, end + 2 * EPS, self._tid(e))
                opened.add((e.step, e.micro_batch, kind, unit))
                for target, run in itertools.groupby([o for o in before if o not in own], key=lambda o: o.unit):
                    self._around(f"FSDP::{kind}_prefetch for {target}", "root", list(run), EPS / 2)
                last = after is None or (after.op is not Op.FWD and after.phase is not Phase.FORWARD)
                if e.op is Op.FWD and (unit != "root" or last):
                    self._cpu(_named("FSDP::post_forward", unit), at + 2 * EPS, at + 3 * EPS, MAIN)
        for first in self._first_of_forwards():
            self._cpu("FSDP::root_pre_forward", _us(first.issue_s) - 9 * EPS, _us(first.issue_s) - 8 * EPS, MAIN)

    def fsdp1(self) -> None:
        for run in self._runs(GATHER):
            self._gather_of_fsdp1(run)
            self._around("FullyShardedDataParallel.rate_limiter", "root", [run[-1]], -0.9 * EPS)
        between: list[list[Event]] = [
            []
        ]  # what is issued from one backward to the next: a post-backward hook, a gather
        for e in self.ops:
            reduced = next((o.unit for o in between[-1] if o.op in REDUCE), e.unit)
            if e.op is Op.BWD or (e.op in REDUCE and e.unit != reduced):
                between.append([])
            if e.op in REDUCE or (e.op in GATHER and between[-1]):
                between[-1].append(e)
        for hook in between:
            last = max((i for i, e in enumerate(hook) if e.op in REDUCE), default=-1)
            inside = hook[: last + 1]
            if inside:
                self._around("FullyShardedDataParallel._post_backward_hook", "root", inside, 2 * EPS)
            if prefetched := [e for e in inside if e.op in GATHER]:
                self._around("FullyShardedDataParallel._post_backward_prefetch", "root", prefetched)
        forwards = [e for e in self.ops if e.op is Op.FWD]
        for (_, _), group in itertools.groupby(forwards, key=lambda e: (e.step, e.micro_batch)):
            whole = list(group)
            first = min(
                e.issue_s for e in self.ops if e.step == whole[0].step and e.micro_batch == whole[0].micro_batch
            )
            self._cpu("FullyShardedDataParallel.forward", _us(first) - 12 * EPS, _us(whole[-1].issue_s) + 6 * EPS, MAIN)
            self._cpu(
                f"nn.Module: {'GPT_0'}",
                _us(first) - 11 * EPS,
                _us(whole[-1].issue_s) + 5 * EPS,
                MAIN,
                cat="python_function",
            )
            at = _us(whole[-1].issue_s)
            self._cpu("FullyShardedDataParallel._post_forward", at + 2 * EPS, at + 3 * EPS, MAIN)
            start, at = self._start_of(whole[0]), _us(whole[0].issue_s)
            self._cpu("FullyShardedDataParallel._pre_forward", start - 6 * EPS, at - 2 * EPS, MAIN)
        for e in forwards:
            if e.unit in self.units and e.unit != "root":
                at, start = _us(e.issue_s), self._start_of(e)
                self._cpu("FullyShardedDataParallel.forward", start - 7 * EPS, at + 4 * EPS, MAIN)
                self._cpu(f"nn.Module: {e.unit}", start - 6.5 * EPS, at + 3.5 * EPS, MAIN, cat="python_function")
                self._cpu("FullyShardedDataParallel._pre_forward", start - 6 * EPS, at - 2 * EPS, MAIN)
                self._cpu("FullyShardedDataParallel._post_forward", at + 2 * EPS, at + 3 * EPS, MAIN)
        opened: set[tuple[int, int]] = set()
        for e in self.ops:
            root = e.unit not in self.units
            if e.op is Op.BWD and not (root and (e.step, e.micro_batch) in opened):
                start, at = self._start_of(e), _us(e.issue_s)
                self._cpu("FullyShardedDataParallel._pre_backward_hook", start - 6 * EPS, at - 2 * EPS, AUTOGRAD)
            if (
                e.op is Op.BWD and root and (e.step, e.micro_batch) not in opened
            ):  # though the root is not gathered again
                start = self._start_of(e)
                limiter = "FullyShardedDataParallel.rate_limiter"
                self._cpu(limiter, start - 5 * EPS, start - 4 * EPS, AUTOGRAD)
            if e.op is Op.BWD and root:
                opened.add((e.step, e.micro_batch))

    def _gather_of_fsdp1(self, run: list[Event]) -> None:
        following = next((e for e in self.ops if e.seq > run[-1].seq), None)
        if following is None or following.op not in (Op.FWD, Op.BWD, *GATHER):
            return
        computes = next(e for e in self.ops if e.seq > run[-1].seq and e.op in (Op.FWD, Op.BWD))
        unit = computes.unit if computes.unit in self.units else "root"
        if unit != run[0].unit:
            kind = "forward" if computes.op is Op.FWD else "backward"
            self._around(f"FullyShardedDataParallel._pre_{kind}_prefetch", "root", run)

    def _ahead_of(self, e: Event) -> list[Event]:
        """What was issued just ahead of a unit's forward or backward: gathers, prefetched ones too, and copy-outs."""
        earlier = [o for o in self.ops if o.seq < e.seq]
        kinds = (*GATHER, Op.AG_COPY_OUT)
        return list(itertools.takewhile(lambda o: o.op in kinds, reversed(earlier)))[::-1]

    def _start_of(self, e: Event) -> float:
        ahead = self._ahead_of(e)
        return _us(ahead[0].issue_s) if ahead else _us(e.issue_s)

    # ---- helpers ----

    def _runs(self, kinds: tuple[Op, ...]) -> Iterator[list[Event]]:
        """Neighbours in issue order, of some kinds and of one unit."""
        for (chosen, _), run in itertools.groupby(self.ops, key=lambda e: (e.op in kinds, e.unit)):
            if chosen:
                yield list(run)

    def _first_of_forwards(self) -> Iterator[Event]:
        seen: set[tuple[int, int]] = set()
        for e in self.ops:
            if e.phase is Phase.FORWARD and (e.step, e.micro_batch) not in seen:
                seen.add((e.step, e.micro_batch))
                yield e

    def _around(self, name: str, unit: str, run: list[Event], more: float = 0.0) -> None:
        start, end = _us(run[0].issue_s) - EPS - more, _us(run[-1].issue_s) + EPS + more
        self._cpu(name if name.startswith("Fully") else _named(name, unit), start, end, self._tid(run[0]))

    def _cpu(self, name: str, start: float, end: float, tid: int, cat: str = "user_annotation", **args: Any) -> None:
        external = args.pop("external", None) or next(self._ids)
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": PID, "tid": tid, "ts": start, "dur": end - start,
             "args": {"External id": external, "Record function id": 0, "Ev Idx": len(self.events), **args}}
        )  # fmt: skip

    @staticmethod
    def _tid(e: Event) -> int:
        return AUTOGRAD if e.phase is Phase.BACKWARD else MAIN


def _named(name: str, unit: str) -> str:
    return name if unit == "root" else f"{name} ({unit})"


def _us(seconds: float, zero: float = ZERO_US) -> float:
    return zero + seconds * 1e6
