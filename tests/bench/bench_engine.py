"""How long the simulator takes, in parts: program, replay, memory, analysis; with and without contention; many ranks.

    models      the whole pass for three models: what a sweep pays for each plan
    ranks       a program of 80 layers on many ranks, each operation with its own jitter: time, and the process's memory
    growth      seconds per unit and per rank as both grow: a straight line is a constant column

Medians over the repeats, of one core: CPU time, which on an idle machine is the time on the clock and on a busy one
does not count the others'. The exit status is 1 if a target is missed. Durations come from the kernels' roofline
(`fsdp_sim.cost.Costs`), asked anew in every replay.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fsdp_sim.cost.costs import Costs
from fsdp_sim.cost.transformer import workload
from fsdp_sim.cost.work import Workload
from fsdp_sim.diagnose import explain
from fsdp_sim.engine import Contention, Run, exposure, memory, run
from fsdp_sim.engine.skew import jitter
from fsdp_sim.schedule import Param, Program, Unit, build
from fsdp_sim.spec import Cluster, Model, Plan
from fsdp_sim.timeline import Op

EXAMPLES = """examples:
  python tests/bench/bench_engine.py
  python tests/bench/bench_engine.py --part models --repeats 50
  python tests/bench/bench_engine.py --part ranks --ranks 1024 16384
"""
BF16 = Plan(param_dtype="bf16", reduce_dtype="fp32", seq_len=8192, activation_checkpointing="full")
CASES = {  # name -> (model, GPUs, plan, at most so many milliseconds for everything)
    "GPT-2 124M, 8 GPUs": ("gpt2-124m", 8, Plan(), 2.0),
    "Llama-3-70B, 512 GPUs": ("llama3-70b", 512, BF16, 8.0),
    "Llama-3-405B, 4,096 GPUs": ("llama3-405b", 4096, BF16, 12.0),
}
RANKS_TARGET_S = {1024: 0.1, 16384: 0.28}
MEMORY_TARGET_GIB = {16384: 2.0}
SLOWER = Contention(compute_slowdown_by_collective=1.1, collective_slowdown_by_compute=1.05, nic_share=1.0)
LAUNCH_S = 6e-6
SECONDS = {Op.FWD: 2e-3, Op.BWD: 4e-3, Op.ALL_GATHER: 1e-3, Op.REDUCE_SCATTER: 1e-3}


@dataclass(frozen=True)
class Case:
    """A model on a cluster, and what is needed to simulate a step of it."""

    workload: Workload
    plan: Plan
    gpus: int

    def build(self) -> Program:
        return build(list(self.workload.units), self.plan, self.gpus)  # a list: not the one that was built before

    def run(self, program: Program, contention: Contention | None = None) -> Run:
        costs = Costs(self.workload, self.plan, Cluster("H100-SXM-80GB", gpus=self.gpus))
        how = {"issue_s": costs.issue_s, "launch_s": LAUNCH_S, "contention": contention, "alike": self.workload.alike}
        return run(program, costs.seconds, **how)  # type: ignore[arg-type]


def median_ms(what: Callable[[], object], repeats: int) -> float:
    """Milliseconds of a call, after one that is not counted. What is there already, Python's collector may skip."""
    what()
    seconds = []
    gc.collect()
    gc.freeze()
    for _ in range(repeats):
        start_s = time.process_time()
        what()
        seconds.append(time.process_time() - start_s)
    return statistics.median(seconds) * 1e3


def models(repeats: int, console: Console) -> bool:
    table = Table(
        "", "instr.", "build", "replay", "memory", "analysis", "all, ms", "us/instr.", "target", "contended", "explain",
        title="one step, one rank stands for all; milliseconds",
    )  # fmt: skip
    met = True
    for name, (model, gpus, plan, target_ms) in CASES.items():
        case = Case(workload(Model.preset(model), plan), plan, gpus)
        program = case.build()
        played = case.run(program)
        parts = {
            "build": case.build,
            "replay": lambda case=case, program=program: case.run(program).step_time_s(),
            "memory": lambda case=case, played=played: memory(played, case.workload).peak_by_category,
            "analysis": lambda played=played: exposure(played),
            "contended": lambda case=case, program=program: case.run(program, SLOWER).step_time_s(),
            "explain": lambda played=played: explain(played).sentences,
        }
        ms = {part: median_ms(what, repeats) for part, what in parts.items()}
        whole = sum(ms[part] for part in ("build", "replay", "memory", "analysis"))
        met &= whole <= target_ms
        row = [f"{ms[part]:.2f}" for part in ("build", "replay", "memory", "analysis")]
        us = f"{whole / len(program) * 1e3:.2f}"
        extra = [f"{ms[part]:.2f}" for part in ("contended", "explain")]
        style = "red" if whole > target_ms else ""
        table.add_row(name, f"{len(program):,}", *row, f"{whole:.2f}", us, f"{target_ms:g}", *extra, style=style)
    console.print(table)
    return met


def layers(n: int) -> list[Unit]:
    """A model of n equal layers of 9 parameters, and a root."""
    params = tuple(Param(f"p{k}", (1024, 1024)) for k in range(9))
    root = Unit("root", (Param("embed", (1024, 8)), Param("head", (1024, 8))), segments=("embed", ..., "head"))
    return [root, *(Unit(f"layers.{i}", params) for i in range(n))]


def jittered(n_layers: int, ranks: int) -> Run:
    """A step of which every operation has its own duration on every rank."""
    program = build(layers(n_layers), Plan(), ranks)
    return run(program, jitter(lambda i: SECONDS.get(i.op, 1e-5), ranks, sigma=0.05, of="all"), ranks=ranks)


def own_process(ranks: int, repeats: int) -> tuple[float, float]:
    """Milliseconds and peak GiB of a process that does nothing else."""
    here = Path(__file__)
    command = [sys.executable, str(here), "--child", str(ranks), "--repeats", str(repeats)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=here.parents[2])
    milliseconds, gib = answer.stdout.split()
    return float(milliseconds), float(gib)


def many(sizes: list[int], repeats: int, console: Console) -> bool:
    table = Table(
        "ranks", "ms", "target", "peak GiB", "target", "us per rank and layer",
        title="80 layers, jitter of every operation on every rank; build, draw, replay, step time",
    )  # fmt: skip
    met = True
    for ranks in sizes:
        ms, gib = own_process(ranks, max(3, repeats // 4))
        target_s, target_gib = RANKS_TARGET_S.get(ranks), MEMORY_TARGET_GIB.get(ranks)
        missed = (target_s is not None and ms > target_s * 1e3) or (target_gib is not None and gib > target_gib)
        met &= not missed
        table.add_row(
            f"{ranks:,}", f"{ms:.1f}", "" if target_s is None else f"{target_s * 1e3:g}", f"{gib:.2f}",
            "" if target_gib is None else f"{target_gib:g}", f"{ms * 1e3 / ranks / 80:.3f}",
            style="red" if missed else "",
        )  # fmt: skip
    console.print(table)
    return met


def growth(repeats: int, console: Console) -> bool:
    """Seconds per unit must not grow with the units: more than half as much again fails."""
    table = Table("layers", "build", "replay", "memory", "analysis", "contended", title="microseconds per layer")
    per_layer: dict[str, list[float]] = {}
    for n in (25, 50, 100, 200, 400):
        program = build(layers(n), Plan(), 64)
        played = run(program, lambda i: SECONDS.get(i.op, 1e-5))
        parts: dict[str, Callable[[], object]] = {
            "build": lambda n=n: build(layers(n), Plan(), 64),
            "replay": lambda p=program: run(p, lambda i: SECONDS.get(i.op, 1e-5)).step_time_s(),
            "memory": lambda p=played: memory(p).peak_bytes,
            "analysis": lambda p=played: exposure(p),
            "contended": lambda p=program: run(p, lambda i: SECONDS.get(i.op, 1e-5), contention=SLOWER),
        }
        us = {part: median_ms(what, repeats) * 1e3 / n for part, what in parts.items()}
        for part, value in us.items():
            per_layer.setdefault(part, []).append(value)
        table.add_row(str(n), *(f"{value:.1f}" for value in us.values()))
    console.print(table)
    return all(min(values[-2:]) <= 1.5 * max(values[:2]) for values in per_layer.values())


def child(ranks: int, repeats: int) -> None:
    ms = median_ms(lambda: jittered(80, ranks).step_time_s(), repeats)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(ms, peak * (1 if sys.platform == "darwin" else 1024) / 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ["models", "ranks", "growth"]
    parser.add_argument("--part", nargs="+", choices=parts, default=parts, help="default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[256, 1024, 4096, 16384], help="default: to 16384")
    parser.add_argument("--repeats", type=int, default=21, help="default: 21")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.repeats)
        return
    console = Console() if sys.stdout.isatty() else Console(width=140)
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    console.print(
        f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, one core of "
        f"{os.cpu_count()}; load {busy:.1f} before the start"
    )
    met = True
    if "models" in options.part:
        met &= models(options.repeats, console)
    if "ranks" in options.part:
        met &= many(options.ranks, options.repeats, console)
    if "growth" in options.part:
        met &= growth(options.repeats, console)
    console.print("all targets met" if met else "a target was missed")
    sys.exit(not met)


if __name__ == "__main__":
    main()
