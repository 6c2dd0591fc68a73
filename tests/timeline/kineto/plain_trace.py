"""Traces of trainings that nobody annotated, with a known truth: a CPU that issues, streams that work off, events.

A `PlainRank` keeps the clock of one rank: what is issued runs when its stream is free and what it waits for has ended.
The trace says no more than Kineto does of DDP, Megatron-LM, DeepSpeed or compiled graphs: kernels, launches with
correlation ids, CPU operations, NCCL's arguments if they were recorded.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

MAIN, AUTOGRAD, COMPUTE = 100, 200, 7
KERNELS = {
    "all_gather": ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "_allgather_base"),
    "reduce_scatter": ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                       "_reduce_scatter_base"),
    "all_reduce": ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "allreduce"),
    "all_to_all": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "all_to_allv"),
    "recv": ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "recv"),
}  # fmt: skip
MATMUL = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT"
AMD = {MATMUL: "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64"}


class PlainRank:
    """One rank while it trains. Times are microseconds.

    Args:
        arguments: NCCL's kernels carry their arguments, as torch records them.
        amd: kernels and calls are named as on AMD.
    """

    def __init__(self, rank: int = 0, world: int = 8, *, arguments: bool = True, amd: bool = False) -> None:
        self.rank, self.world, self.arguments, self.amd = rank, world, arguments, amd
        self.now, self.tid = 1000.0, MAIN
        self.free: dict[int, float] = {}
        self.events: list[dict[str, Any]] = []
        self.turns: dict[str, int] = {}
        self._ids = itertools.count(1)

    def span(self, cat: str, name: str, start: float, end: float, pid: int = 1, **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": args.pop("tid", self.tid), "ts": start,
             "dur": end - start, "args": args}
        )  # fmt: skip

    @contextmanager
    def inside(self, cat: str, name: str, **args: Any) -> Iterator[None]:
        """What is issued in it lies in a span of the CPU."""
        start = self.now
        self.now += 0.5
        yield
        self.now += 0.5
        self.span(cat, name, start, self.now, **args)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """On the autograd engine's thread."""
        self.tid, before = AUTOGRAD, self.tid
        yield
        self.tid = before

    def kernel(
        self, name: str, lasts: float, stream: int = COMPUTE, after: tuple[float, ...] = (), issue: float = 6.0,
        **args: Any,
    ) -> float:  # fmt: skip
        """Launch a kernel; when it ends."""
        number = next(self._ids)
        launch = "hipLaunchKernel" if self.amd else "cudaLaunchKernel"
        at = self.now
        self.span("cuda_runtime", launch, at, at + issue * 0.6, correlation=number)
        self.now += issue
        start = max([at + 3.0, self.free.get(stream, 0.0), *(end + 1.5 for end in after)])
        name = AMD.get(name, name) if self.amd else name
        self.span("kernel", name, start, start + lasts, pid=0, tid=stream, stream=stream, correlation=number, **args)
        self.free[stream] = start + lasts
        return start + lasts

    def op(self, name: str, lasts: float, *, forward: bool = True, matmul: bool = True, **kwargs: Any) -> float:
        """A CPU operation with one kernel."""
        record = {"Sequence number": next(self._ids), "Fwd thread id": 0} if forward else {}
        with self.inside("cpu_op", name, **record):
            return self.kernel(MATMUL if matmul else "vectorized_elementwise_kernel", lasts, **kwargs)

    def collective(
        self, kind: str, lasts: float, n_bytes: int, *, stream: int = 20, group: str = "0", size: int = 0,
        purpose: str = "default_pg", after: tuple[float, ...] = (),
    ) -> float:  # fmt: skip
        """A collective of torch.distributed; when it ends."""
        kernel, called = KERNELS[kind]
        if self.amd:
            kernel = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
        size = size or self.world
        self.turns[group] = self.turns.get(group, 0) + 1
        ratio = {"all_gather": (1, size), "reduce_scatter": (size, 1)}.get(kind, (1, 1))
        whole = n_bytes // 2
        args: dict[str, Any] = {
            "Collective name": called, "In msg nelems": whole * ratio[0] // max(ratio), "dtype": "BFloat16",
            "Out msg nelems": whole * ratio[1] // max(ratio), "Group size": size, "Process Group Name": group,
            "Process Group Description": purpose, "Seq": self.turns[group],
        }  # fmt: skip
        args = args if self.arguments or self.amd else {}
        with self.inside("cpu_op", f"c10d::{called}_"), self.inside("cpu_op", "record_param_comms", **args):
            return self.kernel(kernel, lasts, stream, after, **args)

    def trace(self) -> dict[str, Any]:
        return {
            "schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "AMD MI300X" if self.amd else "NVIDIA H100"}],
            "distributedInfo": {"backend": "nccl", "rank": self.rank, "world_size": self.world},
            "baseTimeNanoseconds": 1790857026000000000, "host_name": f"node{self.rank}", "traceEvents": self.events,
        }  # fmt: skip


def ddp(run: PlainRank, *, steps: int = 3, layers: int = 8, bucket_us: float = 300.0, annotated: bool = False) -> None:
    """DDP: each layer's backward is followed by an all-reduce of its bucket; the optimizer waits for the last."""
    for _ in range(steps):
        for _ in range(layers):
            run.op("aten::mm", 200.0)
        with run.backward():
            for _ in range(layers):
                with run.inside("cpu_op", "autograd::engine::evaluate_function: MmBackward0"):
                    end = run.op("aten::mm", 400.0, forward=False)
                    reduced = run.collective("all_reduce", bucket_us, 50_000_000, after=(end,))
        with run.inside("user_annotation", "Optimizer.step#AdamW.step"):
            run.op("aten::_fused_adamw_", 200.0, forward=False, matmul=False, after=(reduced,))


def megatron(run: PlainRank, *, steps: int = 3, layers: int = 8, reduce_us: float = 150.0) -> None:
    """Tensor parallelism: twice in each layer, forward and backward, compute needs the sum of what it just made."""
    tp = {"group": "5", "size": 2, "purpose": "TENSOR_MODEL_PARALLEL_GROUP", "stream": 21}
    for _ in range(steps):
        for _ in range(2 * layers):
            end = run.op("aten::mm", 300.0)
            summed = run.collective("all_reduce", reduce_us, 20_000_000, after=(end,), **tp)
            run.op("aten::add", 20.0, matmul=False, after=(summed,))
        with run.backward():
            for _ in range(2 * layers):
                with run.inside("cpu_op", "autograd::engine::evaluate_function: _CopyToModelParallelRegionBackward"):
                    end = run.op("aten::mm", 600.0, forward=False)
                    summed = run.collective("all_reduce", reduce_us, 20_000_000, after=(end,), **tp)
                    run.op("aten::add", 20.0, forward=False, matmul=False, after=(summed,))
        with run.inside("user_annotation", "Optimizer.step#FusedAdam.step"):
            run.op("aten::_fused_adamw_", 200.0, forward=False, matmul=False)


def sharded(
    run: PlainRank, *, steps: int = 3, layers: int = 8, gather_us: float = 500.0, reduce_us: float = 300.0,
    ahead: int = 1, engine: Callable[[str], str] = lambda name: name,
) -> None:  # fmt: skip
    """Parameters gathered layer by layer and freed, as a compiled graph and DeepSpeed's ZeRO-3 do, without a name."""
    gathers = {"stream": 22, "group": "1", "purpose": "fsdp"}
    scatters = {"stream": 23, "group": "2", "purpose": "fsdp"}
    for _ in range(steps):
        for phase in ("forward", "backward"):
            lasts, kind = (250.0, "aten::mm") if phase == "forward" else (500.0, "aten::mm")
            arrived: dict[int, float] = {}
            ended: list[float] = []
            order = list(range(layers)) if phase == "forward" else list(range(layers))[::-1]

            def work(order=order, arrived=arrived, ended=ended, lasts=lasts, kind=kind, phase=phase) -> None:
                for place, layer in enumerate(order):
                    for other in order[place : place + 1 + ahead]:
                        if other not in arrived:
                            before = (ended[-1],) if ended and ahead == 0 else ()
                            n_bytes = 100_000_000 + 1_000_000 * (other in (0, layers - 1))
                            arrived[other] = run.collective("all_gather", gather_us, n_bytes, after=before, **gathers)
                    ended.append(run.op(kind, lasts, forward=phase == "forward", after=(arrived[layer],)))
                    if phase == "backward":
                        n_bytes = 100_000_000 + 1_000_000 * (layer in (0, layers - 1))
                        done = run.collective("reduce_scatter", reduce_us, n_bytes, after=(ended[-1],), **scatters)
                        arrived[-1] = done

            if phase == "forward":
                work()
            else:
                with run.backward(), run.inside(
                    "cpu_op", f"autograd::engine::evaluate_function: {engine('CompiledFunctionBackward')}"
                ):  # fmt: skip
                    work()
        with run.inside("user_annotation", "Optimizer.step#AdamW.step"):
            run.op("aten::_fused_adamw_", 300.0, forward=False, matmul=False, after=(run.free[23],))


def pipeline(run: PlainRank, *, steps: int = 3, micro_batches: int = 4, wait_us: float = 400.0) -> None:
    """A stage in the middle of a pipeline: each micro-batch comes from its neighbour."""
    for _ in range(steps):
        for _ in range(micro_batches):
            come = run.collective("recv", wait_us, 10_000_000, stream=24, group="7", size=2, purpose="pp")
            run.op("aten::mm", 300.0, after=(come,))
        with run.backward():
            for _ in range(micro_batches):
                with run.inside("cpu_op", "autograd::engine::evaluate_function: MmBackward0"):
                    come = run.collective("recv", wait_us, 10_000_000, stream=24, group="7", size=2, purpose="pp")
                    run.op("aten::mm", 300.0, forward=False, after=(come,))
        with run.inside("user_annotation", "Optimizer.step#AdamW.step"):
            run.op("aten::_fused_adamw_", 100.0, forward=False, matmul=False)


def late(run: PlainRank, *, steps: int = 3, layers: int = 40, issue_us: float = 80.0) -> None:
    """Small kernels that the CPU launches more slowly than the device runs them; gradients are reduced beside."""
    for _ in range(steps):
        for _ in range(layers):
            run.op("aten::mm", 20.0, issue=issue_us)
        with run.backward():
            for _ in range(layers):
                with run.inside("cpu_op", "autograd::engine::evaluate_function: MmBackward0"):
                    end = run.op("aten::mm", 20.0, forward=False, issue=issue_us)
            reduced = run.collective("all_reduce", 50.0, 1_000_000, after=(end,))
        with run.inside("user_annotation", "Optimizer.step#AdamW.step"):
            run.op("aten::_fused_adamw_", 50.0, forward=False, matmul=False, after=(reduced,))
