"""`calibrate`: measure the machine this runs on, and make a `Cluster` of it that `simulate` takes.

Kernels and collectives are timed on all ranks at once, as they run in training: on CPU cores over gloo, or on the
GPUs of this node over NCCL. The numbers of `fsdp_sim.cost.collectives` are then fitted to the collectives: what a
collective of no bytes takes, what each step adds, how fast bytes pass. On CPU cores the rates of compute are those that
a small transformer reaches in training, see `fsdp_sim.measure.train_probe`: matmuls, what moves bytes, the time Python
takes for each kernel, and what a collective costs in the middle of it. Nothing but the names of the processor and the
GPU goes into the file.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from fsdp_sim.cost import collective_s
from fsdp_sim.measure.fit import rounded
from fsdp_sim.measure.fit_core import fit_collective_s, fit_rates, probe_s, sharded_s
from fsdp_sim.measure.fit_link import fit_link
from fsdp_sim.measure.on_rank import PLAIN, SHARDED, Case, CollectiveTime, KernelTime, Time, measure
from fsdp_sim.measure.processes import measure_in_processes
from fsdp_sim.measure.train_probe import ProbeTime, ShardedTime
from fsdp_sim.ranks import run, track
from fsdp_sim.spec import Cluster, Gpu, Link, gpu, link

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
RINGS = ("all_gather", "reduce_scatter")  # on GPUs the fit takes these alone: a switch may reduce an all-reduce


@dataclass(frozen=True)
class MachineNumbers:
    """What `calibrate` measured, and the cluster that says so.

    Attributes:
        cluster: for `simulate`, and for `Cluster.to_file`.
        kernels: one of each case, at the speed of the median rank.
        collectives: the same, as long as the slowest rank took.
        probes, sharded: what was trained, on CPU cores; seconds of the median rank.
    """

    cluster: Cluster
    kernels: tuple[KernelTime, ...]
    collectives: tuple[CollectiveTime, ...]
    probes: tuple[ProbeTime, ...] = ()
    sharded: tuple[ShardedTime, ...] = ()

    def fitted_s(self, time: CollectiveTime) -> float:
        """What the fitted numbers make of a measured collective."""
        return collective_s(time.op, time.n_bytes, time.group_size, replace(self.cluster, gpus=time.group_size))

    @property
    def errors(self) -> tuple[float, ...]:
        """Of each collective, fitted over measured, less one."""
        return tuple(self.fitted_s(time) / time.seconds - 1 for time in self.collectives)

    @property
    def probe_errors(self) -> tuple[float, ...]:
        """Of each forward and backward that was trained, simulated over measured, less one."""
        return tuple(
            fitted / measured - 1
            for probe in self.probes
            for fitted, measured in zip(probe_s(probe.shape, self.cluster), probe[1:], strict=True)
        )

    @property
    def sharded_errors(self) -> tuple[float, ...]:
        """The same of each step of torch's FSDP2."""
        return tuple(sharded_s(time.shape, self.cluster)[0] / time.seconds - 1 for time in self.sharded)

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
            "sharded": [{"shape": time.shape, "seconds": time.seconds} for time in self.sharded],
            "sharded_error": _errors(self.sharded_errors),
            "collectives": [t._asdict() | {"fitted_s": self.fitted_s(t)} for t in self.collectives],
            "collective_error": _errors(self.errors),
        }


def _errors(of: Sequence[float]) -> dict[str, float] | None:
    errors = sorted(map(abs, of))
    return {"n": len(errors), "median_abs": statistics.median(errors), "max_abs": errors[-1]} if errors else None


def calibrate(
    ranks: int | None = None, *, device: str = "auto", quick: bool = False, progress: bool = False
) -> MachineNumbers:
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
    cases += [Case(SHARDED)] if device == "cpu" and ranks > 1 else []
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
    times = [_over_ranks(of_one) for of_one in zip(*found, strict=True)]
    kernels = tuple(time for time in times if isinstance(time, KernelTime))
    collectives = tuple(time for time in times if isinstance(time, CollectiveTime))
    probes = tuple(time for time in times if isinstance(time, ProbeTime))
    sharded = tuple(time for time in times if isinstance(time, ShardedTime))
    if device == "cuda":
        cluster = _gpus(ranks, kernels, collectives)
    else:
        cluster = _processes(ranks, kernels, collectives, probes, sharded)
    return MachineNumbers(cluster, kernels, collectives, probes, sharded)


def _kernels(device: str, quick: bool) -> list[Case]:
    sides: tuple[int, ...]
    if device == "cuda":
        dtype = "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
        sides = (4096, 8192) if quick else (1024, 2048, 4096, 8192, 16384)
        cases = [Case("matmul", dtype, (side, side, side)) for side in sides]
        cases += [Case("matmul", "fp32", (4096, 4096, 4096)), Case("attention", dtype, (4, 16, 4096, 128))]
        cases += [Case("memory", "fp32", (2**28,)), Case("launch")]
        return [*cases, Case("h2d", shape=(2**26,)), Case("d2h", shape=(2**26,))]
    sides = (256, 512) if quick else (128, 256, 512, 1024)
    cases = [Case("matmul", dtype, (side, side, side)) for dtype in ("fp32", "bf16") for side in sides]
    cases += [Case("matmul", "fp16", (256, 256, 256)), Case("attention", "fp32", (2, 4, 256, 64))]
    cases += [Case("memory", "fp32", (2**24,)), Case("launch")]
    return [*cases, Case(PLAIN)]


def _messages(device: str, ranks: int, quick: bool) -> list[Case]:
    """Collectives of all ranks, and of groups of half as many, a quarter, ...: how they grow with the group."""
    sizes = [ranks // 2**k for k in range(7) if ranks % 2**k == 0 and ranks // 2**k > 1]
    powers = range(12, (30 if device == "cuda" else 24) + 1, 4 if quick else 2)
    return [Case(op, n_bytes=2**p, group_size=size) for size in sizes for op in COLLECTIVES for p in powers]


def _over_ranks(times: Sequence[Time]) -> Any:
    """One time of all ranks': the median of kernels and of training, the slowest of collectives."""
    pick = max if isinstance(times[0], CollectiveTime) else statistics.median
    seconds = [name for name in times[0]._fields if name in ("seconds", "forward_s", "backward_s")]
    return times[0]._replace(**{name: pick([getattr(time, name) for time in times]) for name in seconds})


def _gpus(ranks: int, kernels: Sequence[KernelTime], collectives: Sequence[CollectiveTime]) -> Cluster:
    """The GPUs of this node, and their links."""
    part = _gpu(kernels)
    copies = [k.bytes / k.seconds for k in kernels if k.name in ("h2d", "d2h")]
    host = link(part.host)
    host = replace(host, fraction=min(1.0, rounded(min(copies) / host.bytes_per_s)))
    intra = _link([time for time in collectives if time.op in RINGS], part)
    return Cluster(_as_written(part), gpus=ranks, intra=intra, host=host)


def _processes(
    ranks: int, kernels: Sequence[KernelTime], collectives: Sequence[CollectiveTime], probes: Sequence[ProbeTime],
    sharded: Sequence[ShardedTime],
) -> Cluster:  # fmt: skip
    """Processes on this machine's cores: what each reaches while all train, and gloo between them."""
    part = _core(ranks, kernels, probes)
    cluster = Cluster(_as_written(part), gpus=ranks, intra=_link(collectives, part))
    if not sharded:
        return cluster
    return replace(cluster, gpu=replace(cluster.gpu, collective_s=rounded(fit_collective_s(sharded, cluster))))


def _link(collectives: Sequence[CollectiveTime], part: Gpu) -> Link | None:
    if not collectives:
        return None
    intra = replace(fit_link(collectives, link(part.intra), part), sources=(_source(),))
    return Link.from_table(intra.name, intra.to_table())


def _as_written(part: Gpu) -> Gpu:
    """With the digits that the file keeps."""
    return Gpu.from_table(part.name, part.to_table())


def _core(ranks: int, kernels: Sequence[KernelTime], probes: Sequence[ProbeTime]) -> Gpu:
    """One rank's part of this machine's processor: all were measured at once, each with its threads."""
    attention_flops = _best(kernels, "attention", "fp32")
    stream_bytes_per_s = _memory(kernels)
    rates = fit_rates(probes, attention_flops, stream_bytes_per_s)
    in_training = min(1.0, rates.matmul_flops / _best(kernels, "matmul", "fp32"))  # fp32's, taken for all
    halves = {dtype: rounded(in_training * _best(kernels, "matmul", dtype)) for dtype in ("bf16", "fp16")}
    launch_s = rates.launch_s or _launch_s(kernels)
    return replace(
        gpu("cpu"), name=processor_name(), mem_bytes=rounded(psutil.virtual_memory().total / ranks),
        mem_bytes_per_s=rounded(rates.bytes_per_s), stream_bytes_per_s=stream_bytes_per_s,
        fp32_flops=rounded(rates.matmul_flops), bf16_flops=halves["bf16"], fp16_flops=halves["fp16"],
        sustained_matmul_flops=halves["bf16"], attention_flops=attention_flops, matmul_ramp=rounded(rates.matmul_ramp),
        launch_s=rounded(launch_s), backward_launch_s=rounded(rates.backward_launch_s or launch_s),
        tdp_w=None, sources=(_source(),),
    )  # fmt: skip


def _gpu(kernels: Sequence[KernelTime]) -> Gpu:
    """This machine's GPU: the catalogue's where it has it, else what the driver says and what was measured."""
    properties = torch.cuda.get_device_properties(0)
    dtype = next(k.dtype for k in kernels if k.name == "matmul")
    largest = max((k for k in kernels if (k.name, k.dtype) == ("matmul", dtype)), key=lambda k: k.flops)
    sustained, memory = rounded(largest.flops / largest.seconds), _memory(kernels)  # small ones run at a higher clock
    peak: dict[str, Any] = {f"{dtype}_flops": _best(kernels, "matmul", dtype)}
    try:
        known = gpu(properties.name)
    except ValueError:
        known = Gpu(
            name=properties.name, arch=f"sm_{properties.major}{properties.minor}", mem_bytes=properties.total_memory,
            mem_bytes_per_s=memory, sms=properties.multi_processor_count, fp32_flops=_best(kernels, "matmul", "fp32"),
            **peak,
        )  # fmt: skip
    return replace(
        known, sustained_matmul_flops=sustained, stream_bytes_per_s=memory,
        attention_flops=_best(kernels, "attention", dtype), launch_s=_launch_s(kernels),
        mem_bytes=properties.total_memory, sources=(_source(),),
    )  # fmt: skip


def _best(kernels: Sequence[KernelTime], name: str, dtype: str) -> float:
    return rounded(max(k.flops / k.seconds for k in kernels if (k.name, k.dtype) == (name, dtype)))


def _memory(kernels: Sequence[KernelTime]) -> float:
    return rounded(max(k.bytes / k.seconds for k in kernels if k.name == "memory"))


def _launch_s(kernels: Sequence[KernelTime]) -> float:
    return rounded(next(k.seconds for k in kernels if k.name == "launch"))


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
        done = subprocess.run(["sysctl", "-n", "machdep.cpu.brand_string"], capture_output=True, text=True, check=False)
        if done.stdout.strip():
            return done.stdout.strip()
    return platform.processor() or platform.machine() or "cpu"


def _source() -> str:
    return f"fsdp-sim calibrate, torch {torch.__version__}, {cores()} cores"
