"""`calibrate`: measure the machine this runs on, and make a `Cluster` of it that `simulate` takes.

Kernels and collectives are timed on all ranks at once, as they run in training: on CPU cores over gloo, or on the
GPUs of this node over NCCL. The numbers of `fsdp_sim.cost.collectives` are then fitted to the collectives: what a
collective of no bytes takes, what each step adds, how fast bytes pass. On CPU cores the rates of compute are those that
a small transformer reaches in training, see `fsdp_sim.measure.train_probe`: matmuls, what moves bytes, and the time
Python takes for each kernel. Nothing but the names of the processor and the GPU goes into the file.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch

from fsdp_sim.cost.collectives import collective_s, fitted, paths
from fsdp_sim.measure.on_rank import Case, CollectiveTime, KernelTime, measure
from fsdp_sim.measure.processes import measure_in_processes
from fsdp_sim.measure.train_probe import SHAPES, ProbeTime, amounts_of_probe
from fsdp_sim.ranks import run, track
from fsdp_sim.spec import Cluster, Gpu, Link, gpu, link

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
MOST = 4.0  # how far off a fit may be, as a factor, before it says nothing about the machine
RINGS = ("all_gather", "reduce_scatter")  # on GPUs the fit takes these alone: a switch may reduce an all-reduce


@dataclass(frozen=True)
class Found:
    """What `calibrate` measured, and the cluster that says so.

    Attributes:
        cluster: for `simulate`, and for `Cluster.to_file`.
        kernels: one of each case, at the speed of the median rank.
        collectives: the same, as long as the slowest rank took.
        probes: what was trained, on CPU cores; seconds of the median rank.
    """

    cluster: Cluster
    kernels: tuple[KernelTime, ...]
    collectives: tuple[CollectiveTime, ...]
    probes: tuple[ProbeTime, ...] = ()

    def fitted_s(self, time: CollectiveTime) -> float:
        """What the fitted numbers make of a measured collective."""
        return collective_s(time.op, time.n_bytes, time.group_size, replace(self.cluster, gpus=time.group_size))

    @property
    def errors(self) -> tuple[float, ...]:
        """Of each collective, fitted over measured, less one."""
        return tuple(self.fitted_s(time) / time.seconds - 1 for time in self.collectives)

    @property
    def probe_errors(self) -> tuple[float, ...]:
        """Of each forward and backward that was trained, fitted over measured, less one."""
        if not self.probes:
            return ()
        matrix, measured_s = _training(self.probes)
        part, share = self.cluster.gpu, _share(self.cluster.gpus)
        per = (part.mem_bytes_per_s, part.peak_flops("fp32"), part.attention_flops or np.inf)
        costs_s = np.array([(part.launch_s or 0.0) * min(1.0, share), *(share / rate for rate in per)])
        return tuple((matrix @ costs_s / measured_s - 1).tolist())

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "hardware": self.cluster.gpu.name,
            "ranks": self.cluster.gpus,
            "gpu": self.cluster.gpu.to_table(),
            "link": self.cluster.intra_link.to_table(),
            "kernels": [kernel._asdict() for kernel in self.kernels],
            "training": [
                {"shape": probe.shape, "forward_s": probe.forward_s, "backward_s": probe.backward_s}
                for probe in self.probes
            ],
            "training_error": _errors(self.probe_errors),
            "collectives": [t._asdict() | {"fitted_s": self.fitted_s(t)} for t in self.collectives],
            "collective_error": _errors(self.errors),
        }


def _errors(of: Sequence[float]) -> dict[str, float] | None:
    errors = sorted(map(abs, of))
    return {"n": len(errors), "median_abs": statistics.median(errors), "max_abs": errors[-1]} if errors else None


def calibrate(ranks: int | None = None, *, device: str = "auto", quick: bool = False, progress: bool = False) -> Found:
    """Measure this machine.

    Args:
        ranks: how many there will be; by default 4 on CPU cores, all GPUs on GPUs.
        device: ``cpu``, ``cuda``, or ``auto``: GPUs where torch finds any.
        quick: fewer sizes, each repeated less.
        progress: show a bar.

    Raises:
        ValueError: a device or a number of ranks that this machine does not have.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"there is no device {device!r}; there are auto, cpu and cuda")
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "cuda" and not there:
        raise ValueError("torch finds no GPU on this machine; take device cpu, or install a torch built for its driver")
    device = device if device != "auto" else "cuda" if there else "cpu"
    ranks = ranks or (there if device == "cuda" else 4)
    if not 1 <= ranks <= (there if device == "cuda" else 64):
        raise ValueError(f"{ranks} ranks: this machine takes 1 to {there if device == 'cuda' else 64} on {device}")
    cases = [*_kernels(device, quick), *_messages(device, ranks, quick)]
    budget_s = 0.1 if quick else 0.3
    if device == "cuda":
        if progress:
            print(f"measuring {ranks} GPUs: {len(cases)} cases of {budget_s} s", flush=True)
        found = measure_in_processes(ranks, cases, budget_s)
    else:
        found = run(
            measure, ranks, cases, device, budget_s, track, record=False, progress=progress, show_output=False,
            timeout_s=60.0, title=f"measuring {ranks} ranks",
        )  # fmt: skip
    times = [_over_ranks(list(of_one)) for of_one in zip(*found, strict=True)]
    kernels = tuple(t for t in times if isinstance(t, KernelTime))
    collectives = tuple(t for t in times if isinstance(t, CollectiveTime))
    probes = tuple(t for t in times if isinstance(t, ProbeTime))
    return Found(_cluster(device, ranks, kernels, collectives, probes), kernels, collectives, probes)


def _kernels(device: str, quick: bool) -> list[Case]:
    sides: tuple[int, ...]
    if device == "cuda":
        dtype = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
        sides = (4096, 8192) if quick else (1024, 2048, 4096, 8192, 16384)
        cases = [Case("matmul", dtype, (side, side, side)) for side in sides]
        cases += [Case("matmul", "fp32", (4096, 4096, 4096)), Case("attention", dtype, (4, 16, 4096, 128))]
        cases += [Case("memory", "fp32", (2**28,)), Case("launch")]
        return [*cases, Case("h2d", shape=(2**26,)), Case("d2h", shape=(2**26,))]
    sides = (256, 512) if quick else (128, 256, 512, 1024)
    cases = [Case("matmul", dtype, (side, side, side)) for dtype in ("fp32", "bf16") for side in sides]
    cases += [Case("matmul", "fp16", (256, 256, 256)), Case("attention", "fp32", (2, 4, 256, 64))]
    cases += [Case("memory", "fp32", (2**24,)), Case("launch")]
    return [*cases, *(Case("train", shape=shape) for shape in SHAPES)]


def _messages(device: str, ranks: int, quick: bool) -> list[Case]:
    """Collectives of all ranks, and of groups of half as many, a quarter, ...: how they grow with the group."""
    sizes = [ranks // 2**k for k in range(7) if ranks % 2**k == 0 and ranks // 2**k > 1]
    powers = range(12, (30 if device == "cuda" else 24) + 1, 4 if quick else 2)
    return [Case(op, n_bytes=2**p, group_size=size) for size in sizes for op in COLLECTIVES for p in powers]


def _over_ranks(times: list[Any]) -> Any:
    """One time of all ranks': the median of kernels and of training, the slowest of collectives."""
    if isinstance(times[0], ProbeTime):
        forward_s, backward_s = (statistics.median(of_ranks) for of_ranks in list(zip(*times, strict=True))[1:])
        return ProbeTime(times[0].shape, forward_s, backward_s)
    pick = max if isinstance(times[0], CollectiveTime) else statistics.median
    return times[0]._replace(seconds=pick([t.seconds for t in times]))


def _cluster(
    device: str, ranks: int, kernels: Sequence[KernelTime], collectives: Sequence[CollectiveTime],
    probes: Sequence[ProbeTime],
) -> Cluster:  # fmt: skip
    part = _gpu(kernels) if device == "cuda" else _core(ranks, kernels, probes)
    copies = [k.bytes / k.seconds for k in kernels if k.name in ("h2d", "d2h")]
    host = None
    if copies:
        host = link(part.host)
        host = replace(host, fraction=min(1.0, _rounded(min(copies) / host.bytes_per_s)))
    rings = [t for t in collectives if device == "cpu" or t.op in RINGS]
    intra = fit_link(rings, link(part.intra), part) if rings else None
    part = Gpu.from_table(part.name, part.to_table())  # with the digits that the file keeps
    return Cluster(part, gpus=ranks, intra=intra and Link.from_table(intra.name, intra.to_table()), host=host)


def _core(ranks: int, kernels: Sequence[KernelTime], probes: Sequence[ProbeTime]) -> Gpu:
    """One rank's part of this machine's processor.

    Its rates are those of one core in training. Ranks that are fewer than the cores share them out as threads; ranks
    that are more take turns when all compute, as they mostly do in a step. What Python does is done by one thread.
    """
    share = _share(ranks)
    rates = fit_rates(kernels, probes, share)
    in_training = min(1.0, share * rates.matmul_flops / _best(kernels, "matmul", "fp32"))  # fp32's, taken for all
    halves = {
        dtype: _rounded(min(1.0, share) * in_training * _best(kernels, "matmul", dtype)) for dtype in ("bf16", "fp16")
    }
    return replace(
        gpu("cpu"), name=processor_name(), mem_bytes=_rounded(psutil.virtual_memory().total / ranks),
        mem_bytes_per_s=_rounded(share * rates.bytes_per_s),
        stream_bytes_per_s=_rounded(min(1.0, share) * _memory(kernels)),
        fp32_flops=_rounded(share * rates.matmul_flops), bf16_flops=halves["bf16"], fp16_flops=halves["fp16"],
        best_matmul_flops=halves["bf16"], attention_flops=_rounded(share * rates.attention_flops),
        launch_s=_rounded(rates.launch_s / min(1.0, share)), tdp_w=None, sources=(_source(),),
    )  # fmt: skip


def _share(ranks: int) -> float:
    """Cores that a rank has for itself: whole ones, its threads, or a part of one."""
    return cores() // ranks if ranks < cores() else cores() / ranks


class Rates(NamedTuple):
    """What one core reaches in training.

    Attributes:
        matmul_flops, attention_flops: FLOP/s in fp32.
        bytes_per_s: of pointwise kernels, norms, copies, the loss.
        launch_s: what Python, autograd and the dispatcher take for each kernel.
    """

    matmul_flops: float
    attention_flops: float
    bytes_per_s: float
    launch_s: float


def fit_rates(kernels: Sequence[KernelTime], probes: Sequence[ProbeTime], share: float = 1.0) -> Rates:
    """The rates whose forwards and backwards take nearest to the measured times, relative to them.

    Args:
        share: cores that each kernel had, if more than one.

    Attention is too small a part of them to be fitted: it has the rate of the kernel measured alone. So have bytes and
    the launch of a kernel where the best fit has none for them.

    Raises:
        ValueError: no rates make such times.
    """
    matrix, measured_s = _training(probes)
    threads = max(1.0, share)
    attention_flops = _best(kernels, "attention", "fp32") / threads
    rest_s = np.maximum(measured_s - matrix[:, -1] / attention_flops, 0.1 * measured_s)
    launch_s, byte_s, flop_s = least_squares_above_zero(matrix[:, :-1], rest_s, 2)
    return Rates(
        1 / flop_s, attention_flops, 1 / byte_s if byte_s else _memory(kernels), launch_s or _launch_s(kernels)
    )


def _training(probes: Sequence[ProbeTime]) -> tuple[np.ndarray, np.ndarray]:
    """A row for each forward and backward: kernels, bytes, matmul FLOPs, attention FLOPs. And the measured seconds."""
    rows = [
        (of.kernels, of.bytes, of.matmul_flops, of.attention_flops)
        for probe in probes
        for of in amounts_of_probe(probe.shape)
    ]
    return np.array(rows), np.array([seconds for probe in probes for seconds in probe[1:]])


def _gpu(kernels: Sequence[KernelTime]) -> Gpu:
    """This machine's GPU: the catalogue's where it has it, else what the driver says and what was measured."""
    properties = torch.cuda.get_device_properties(0)
    dtype = next(k.dtype for k in kernels if k.name == "matmul")
    best, memory = _best(kernels, "matmul", dtype), _memory(kernels)
    peak: dict[str, Any] = {f"{dtype}_flops": best}
    try:
        known = gpu(properties.name)
    except ValueError:
        known = Gpu(
            name=properties.name, arch=f"sm_{properties.major}{properties.minor}", mem_bytes=properties.total_memory,
            mem_bytes_per_s=memory, sms=properties.multi_processor_count, fp32_flops=_best(kernels, "matmul", "fp32"),
            **peak,
        )  # fmt: skip
    return replace(
        known, best_matmul_flops=best, stream_bytes_per_s=memory, attention_flops=_best(kernels, "attention", dtype),
        launch_s=_launch_s(kernels), mem_bytes=properties.total_memory, sources=(_source(),),
    )  # fmt: skip


def _best(kernels: Sequence[KernelTime], name: str, dtype: str) -> float:
    return _rounded(max(k.flops / k.seconds for k in kernels if (k.name, k.dtype) == (name, dtype)))


def _memory(kernels: Sequence[KernelTime]) -> float:
    return _rounded(max(k.bytes / k.seconds for k in kernels if k.name == "memory"))


def _launch_s(kernels: Sequence[KernelTime]) -> float:
    return _rounded(next(k.seconds for k in kernels if k.name == "launch"))


def fit_link(times: Sequence[CollectiveTime], start: Link, part: Gpu) -> Link:
    """The link whose collectives take nearest to the measured times: least squares of the relative error.

    The times are linear in what is sought (base, hop, fill, and seconds per byte, on CPU cores for each collective
    apart), and none of it is negative.

    Raises:
        ValueError: no link has such times.
    """
    zero = replace(start, base_s=0.0, hop_s=0.0, fill_s=0.0, fraction=1.0)
    ops = list(dict.fromkeys(time.op for time in times)) if part.arch == "CPU" else [""]
    ones = [replace(zero, base_s=1.0), replace(zero, hop_s=1.0), replace(zero, fill_s=1.0)]
    rows = []
    for time in times:
        per_byte_s = _ring_s(time, zero, part)
        latencies = [_ring_s(time, one, part) - per_byte_s for one in ones]
        rows.append([*latencies, *(per_byte_s if op in ("", time.op) else 0.0 for op in ops)])
    x = least_squares_above_zero(np.array(rows), np.array([t.seconds for t in times]), len(ones))
    base_s, hop_s, fill_s = map(_rounded, x[: len(ones)])
    start = replace(start, base_s=base_s, hop_s=hop_s, fill_s=fill_s, sources=(_source(),))
    slowness = dict(zip(ops, x[len(ones) :], strict=True))
    if part.arch != "CPU":
        return replace(start, fraction=min(1.0, _rounded(1 / slowness[""])))
    gather = slowness["all_gather"]
    return replace(
        start,
        bytes_per_s=_rounded(start.bytes_per_s / gather),  # no datasheet gives this link a peak
        reduce_scatter_fraction=_rounded(gather / slowness["reduce_scatter"]),
        all_reduce_fraction=_rounded(gather / slowness["all_reduce"]),
    )


def _ring_s(time: CollectiveTime, intra: Link, part: Gpu) -> float:
    """What a ring over that link takes for the same collective."""
    cluster = Cluster(part, gpus=time.group_size, intra=intra)
    found = paths(time.op, time.group_size, cluster, 1, fitted())
    return next(path for path in found if path.algorithm == "ring").seconds(time.n_bytes)


def least_squares_above_zero(matrix: np.ndarray, right: np.ndarray, first_needed: int) -> np.ndarray:
    """The x >= 0 that brings ``matrix @ x`` nearest to ``right``, relative to what it makes of it.

    Every choice of which of the first columns to leave out is tried; those from ``first_needed`` on have to be above 0.

    Raises:
        ValueError: there is no such x, or it is off by a factor of `MOST`.
    """
    columns = matrix.shape[1]
    needed = tuple(range(first_needed, columns))
    best, best_error = None, np.inf
    for count in range(first_needed + 1):
        for extra in itertools.combinations(range(first_needed), count):
            chosen, x, weight = [*extra, *needed], np.zeros(columns), 1 / right
            for _ in range(20):  # relative to the fit, not to the noisy measurement, which would favour fits too low
                x[chosen] = np.linalg.lstsq(matrix[:, chosen] * weight[:, None], right * weight, rcond=None)[0]
                if x[chosen].min() <= 0:
                    break
                weight = 1 / (matrix @ x)
            else:
                error = float(np.sqrt(np.mean(np.log(matrix @ x / right) ** 2)))
                if error < best_error:
                    best, best_error = x, error
    if best is None or best_error > np.log(MOST):
        raise ValueError(
            "the measured times fit no link and no rate, such as less time for more bytes; measure on an idle machine"
        )
    return best


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """The processor's model, without anything about this particular machine."""
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "cpu model", "hardware")):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        told = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if told.stdout.strip():
            return told.stdout.strip()
    return platform.processor() or platform.machine() or "cpu"


def _source() -> str:
    return f"fsdp-sim calibrate, torch {torch.__version__}, {cores()} cores"


def _rounded(value: float) -> float:
    """Three digits: more is noise, and the file is read by people."""
    return float(f"{value:.3g}")
