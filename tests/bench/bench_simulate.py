"""How long a prediction takes: from a cold start, for one request after another, and for a sweep of many.

The parts of a prediction are timed apart, and a profile says in which files the time goes. Everything is on one core
but the sweep, which has two. Milliseconds are of CPU time, the least of several runs: what they are on a machine that
does nothing else. A program is built once for all plans that issue the same; "built" is what that takes.
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
from pathlib import Path

from rich.console import Console
from rich.table import Table

import fsdp_sim
from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.schedule import build
from fsdp_sim.timeline import FIELDS

COLD_S, SWEEP_S = 0.5, 6.0
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
REQUESTS = {  # name: model, cluster, plan, milliseconds it may take
    "GPT-2 124M, 8 GPUs": ("gpt2-124m", Cluster("A100", gpus=8), Plan(micro_batch=8, **BF16), 2.0),
    "Llama-3 8B, 64 GPUs": ("llama3-8b", Cluster("H100", gpus=64), Plan(seq_len=8192, **BF16), None),
    "Llama-3 70B, 512 GPUs": (
        "llama3-70b", Cluster("H100", gpus=512), Plan(seq_len=8192, activation_checkpointing="full", **BF16), 8.0,
    ),
    "Llama-3 405B, 4,096 GPUs": (
        "llama3-405b", Cluster("H100", gpus=4096), Plan(seq_len=8192, activation_checkpointing="full", **BF16), 12.0,
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


def parts_s(model: Model, cluster: Cluster, plan: Plan) -> dict[str, float]:
    """CPU seconds of each part of a prediction, in order."""
    found: dict[str, float] = {}
    clock = time.process_time()

    def lap(part: str) -> None:
        nonlocal clock
        now = time.process_time()
        found[part], clock = now - clock, now

    sim = simulate(model, cluster, plan)
    lap("workload")
    _ = sim.program
    lap("program")
    _ = sim.step_time_s
    lap("replay")
    _ = sim.peak_memory_bytes
    lap("memory")
    _ = sim.exposure
    lap("exposure")
    _ = [sim.timeline.columns[name] for name in FIELDS]
    lap("timeline")
    explained = sim.explain()
    _ = explained.culprits
    lap("explain")
    _ = explained.gains
    lap("gains")
    _ = explained.sentences
    lap("sentences")
    return found


def latencies(runs: int) -> Table:
    """Program, replay, memory, timeline and explanation of each request; what its gains cost is not in "all"."""
    table = Table(
        "request",
        "instructions",
        box=None,
        padding=(0, 2, 0, 0),
        title="milliseconds of CPU time",
        title_justify="left",
    )
    for name in ("all", "at most", *parts_s(Model.preset("gpt2-124m"), Cluster("A100", gpus=8), Plan()), "built"):
        table.add_column(name, justify="right")
    for name, (model_name, cluster, plan, most) in REQUESTS.items():
        model = Model.preset(model_name)
        sim = simulate(model, cluster, plan)
        units = list(sim.workload.units)  # of a list a program is built anew
        built_s, each = [], []
        for _ in range(runs):
            begun = time.process_time()
            build(units, plan, cluster.gpus)
            built_s.append(time.process_time() - begun)
            each.append(parts_s(model, cluster, plan))
        least = {part: min(one[part] for one in each) for part in each[0]}
        whole_s = sum(seconds for part, seconds in least.items() if part != "gains")
        figures = [f"{seconds * 1e3:.2f}" for seconds in (*least.values(), min(built_s))]
        table.add_row(
            name, str(len(sim.program)), f"{whole_s * 1e3:.2f}", "" if most is None else f"{most:.0f}", *figures
        )
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
    profile = cProfile.Profile(time.process_time)
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
