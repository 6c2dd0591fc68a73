"""How long a prediction takes: from a cold start, for one request after another, and for a sweep of many.

The parts of a prediction are timed apart, and a profile says in which files the time goes. Everything is on one core
but the sweep, which has two. Figures are the medians of several runs, on a machine that may be doing something else.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

import fsdp_sim
from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.cost import fitted

COLD_S, SWEEP_S = 0.5, 90.0
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
REQUESTS = {  # name: model, cluster, plan, milliseconds it may take
    "GPT-2 124M, 8 GPUs": ("gpt2-124m", Cluster("A100", gpus=8), Plan(micro_batch=8, **BF16), 2.0),
    "Llama-3 8B, 64 GPUs": ("llama3-8b", Cluster("H100", gpus=64), Plan(seq_len=8192, **BF16), None),
    "Llama-3 70B, 512 GPUs": (
        "llama3-70b", Cluster("H100", gpus=512), Plan(seq_len=8192, activation_checkpointing="full", **BF16), 10.0,
    ),
    "Llama-3 405B, 4,096 GPUs": (
        "llama3-405b", Cluster("H100", gpus=4096), Plan(seq_len=8192, activation_checkpointing="full", **BF16), 20.0,
    ),
}  # fmt: skip
SWEEP = {  # 10,000 plans
    "gpus": "8,16,32,64,128,256,512,1024,2048,4096",
    "micro_batch": "1,2,4,8,16",
    "seq_len": "1024,2048,4096,8192,16384",
    "activation_checkpointing": "none,selective,2,full",
    "forward_prefetch": "none,1,2,3,4",
    "reshard_after_forward": "none,true",
}
COLD = """
import json, sys, time
start = time.perf_counter()
import fsdp_sim
imported = time.perf_counter()
sim = fsdp_sim.simulate("gpt2-124m", fsdp_sim.Cluster("A100", gpus=8), fsdp_sim.Plan(micro_batch=8, param_dtype="bf16"))
sim.step_time_s, sim.peak_memory_bytes
print(json.dumps([imported - start, time.perf_counter() - start, "torch" in sys.modules]))
"""


def cold_start(runs: int) -> tuple[float, float]:
    """Median seconds of ``import fsdp_sim``, and of that with a first simulation, in fresh interpreters."""
    found = []
    for _ in range(runs):
        text = subprocess.run([sys.executable, "-c", COLD], check=True, capture_output=True, text=True).stdout
        found.append(json.loads(text))
    assert not any(torch for *_, torch in found)
    return statistics.median(one[0] for one in found), statistics.median(one[1] for one in found)


def median_ms(function: Callable[[], object], runs: int) -> float:
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def latencies(runs: int) -> Table:
    """Program, replay, memory and analysis of each request, with and without contention, and by part."""
    table = Table(
        "request", "instructions", box=None, padding=(0, 2, 0, 0), title="milliseconds, median", title_justify="left"
    )
    columns = ("all", "at most", "no contention", "workload", "program", "replay", "memory", "exposure", "explain")
    for name in columns:
        table.add_column(name, justify="right")
    alone = replace(fitted(), contention=0.0)
    for name, (model_name, cluster, plan, most) in REQUESTS.items():
        model = Model.preset(model_name)

        def whole(calibration: object = None) -> object:
            sim = simulate(model, cluster, plan, calibration=calibration)  # noqa: B023
            return sim.step_time_s, sim.exposed_comm_s, sim.peak_memory_bytes, sim.mfu

        whole()
        parts: dict[str, list[float]] = {
            part: [] for part in ("workload", "program", "run", "memory", "exposure", "explain")
        }
        for _ in range(runs):
            clock = time.perf_counter()
            sim = simulate(model, cluster, plan)
            for part in parts:
                if part == "explain":
                    _ = sim.explain().sentences
                elif part != "workload":
                    found = getattr(sim, part)
                    _ = found.peak_bytes if part == "memory" else None
                now = time.perf_counter()
                parts[part].append(now - clock)
                clock = now
        figures = [f"{statistics.median(times) * 1e3:.2f}" for times in parts.values()]
        all_ms, alone_ms = median_ms(whole, runs), median_ms(lambda: whole(alone), runs)
        table.add_row(
            name, str(len(sim.program)), f"{all_ms:.2f}", "" if most is None else f"{most:.0f}", f"{alone_ms:.2f}",
            *figures,
        )  # fmt: skip
    return table


def sweep_s(plans: int, processes: int) -> tuple[float, float, int]:
    """Seconds of the command, start included; of CPU in all its processes; how many plans it simulated."""
    vary = {name: values.split(",") for name, values in SWEEP.items()}
    count = 1
    for name in list(vary):
        keep = max(1, min(len(vary[name]), plans // count))
        vary[name] = vary[name][:keep]
        count *= keep
    words = [word for name, values in vary.items() for word in ("--vary", f"{name}={','.join(values)}")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sweep.csv"
        command = [sys.executable, "-m", "fsdp_sim.cli.main", "sweep", "--model", "llama3-8b", "--gpu", "H100"]
        command += ["--param-dtype", "bf16", *words, "--out", str(out), "--processes", str(processes)]
        start, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, capture_output=True)
        seconds, after = time.perf_counter() - start, os.times()
        cpu_s = after.children_user + after.children_system - before.children_user - before.children_system
        return seconds, cpu_s, out.read_text().count("\n") - 1


def hot_spots(runs: int) -> Table:
    """Where the time of one prediction goes, by file and by function."""
    model_name, cluster, plan, _ = REQUESTS["Llama-3 8B, 64 GPUs"]
    profile = cProfile.Profile()
    for _ in range(runs):
        profile.enable()
        sim = simulate(model_name, cluster, plan)
        _ = sim.step_time_s, sim.exposed_comm_s, sim.peak_memory_bytes, sim.mfu
        profile.disable()
    root = Path(fsdp_sim.__file__).parent
    files: Counter[str] = Counter()
    functions: Counter[str] = Counter()
    total = 0.0
    for (path, line, function), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        inside = Path(path).is_relative_to(root)
        where = str(Path(path).relative_to(root)) if inside else "outside"
        files[where] += own_s
        functions[f"{where}:{line} {function}" if inside else function] += own_s
        total += own_s
    table = Table("share", "file", "share", "function", box=None, padding=(0, 2, 0, 0))
    for (file, file_s), (function, function_s) in zip(files.most_common(12), functions.most_common(12), strict=True):
        table.add_row(f"{file_s / total:.0%}", file, f"{function_s / total:.0%}", function)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="of each measurement")
    parser.add_argument("--plans", type=int, default=10_000, help="of the sweep; 0 for no sweep")
    parser.add_argument("--processes", type=int, default=2, help="of the sweep")
    chosen = parser.parse_args()
    console = Console(width=150)

    import_s, first_s = cold_start(max(3, chosen.runs // 2))
    console.print(
        f"import fsdp_sim: {import_s * 1e3:.0f} ms; with a first simulation: {first_s:.2f} s (at most {COLD_S} s)"
    )
    console.print(latencies(chosen.runs))
    console.print("\nWhere the time of Llama-3 8B goes (profiled):", hot_spots(5), sep="\n")
    if chosen.plans:
        seconds, cpu_s, count = sweep_s(chosen.plans, chosen.processes)
        console.print(
            f"\nSweep of {count:,} plans of Llama-3 8B, {chosen.processes} processes: {seconds:.1f} s, and "
            f"{cpu_s:.1f} s of CPU, {cpu_s / count * 1e3:.1f} ms a plan (10,000 plans: {seconds / count * 1e4:.0f} s, "
            f"{cpu_s / count * 1e4 / chosen.processes:.0f} s if nothing else ran; at most {SWEEP_S:.0f} s)"
        )


if __name__ == "__main__":
    main()
