"""How long reading a large trace takes and how much memory: a generated GPU trace of 100 MB, plain and gzip.

    python -m tests.bench.bench_kineto              100 MB
    python -m tests.bench.bench_kineto --mb 500

The trace is that of a simulated step of Llama 3 8B (`tests.timeline.kineto.gpu_trace`), repeated until the file is
large enough. Each reading is a process of its own, so that its peak of resident memory is that of the reading. Asked
for: 100 MB in at most 15 s and 1 GiB.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from fsdp_sim import Cluster, Plan, simulate
from tests.timeline.kineto.gpu_trace import kineto_trace

READ = """
import sys, time
from pathlib import Path
from fsdp_sim.timeline.kineto import read_kineto
before = time.perf_counter()
timeline = read_kineto(sys.argv[1])
seconds = time.perf_counter() - before
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(f"{seconds:.1f} s, peak {int(peak.split()[1]) / 2**20:.2f} GiB, {timeline!r}")
"""


def write(file: TextIO, n_bytes: int) -> None:
    """Write a trace of some size: one simulated step after the other."""
    plan = Plan(micro_batch=1, seq_len=4096, param_dtype="bf16")
    sim = simulate("llama3-8b", Cluster("H100-SXM-80GB", gpus=64), plan)
    trace = kineto_trace(sim.timeline, pieces=60)
    events = trace.pop("traceEvents")
    took = sim.step_time_s * 1e6 + 1000.0
    file.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n')
    step = 0
    while file.tell() < n_bytes:
        if step:
            file.write(",\n")
        file.write(",\n".join(json.dumps(_later(event, step, took), indent=1) for event in events))
        step += 1
    file.write("\n]}")


def _later(event: dict[str, Any], step: int, took: float) -> dict[str, Any]:
    """The same event some steps later."""
    ids = step * 1_000_000
    moved = event | {"ts": round(event["ts"] + step * took, 3)}
    if event["name"] == "ProfilerStep#0":
        moved["name"] = f"ProfilerStep#{step}"
    if "id" in event:
        moved["id"] += ids
    moved["args"] = {
        key: value + ids if key in ("correlation", "External id") else value
        for key, value in event.get("args", {}).items()
    }
    return moved


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=100, help="megabytes of the trace")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "trace.json")
        with plain.open("w") as file:
            write(file, args.mb * 1_000_000)
        packed = Path(folder, "trace.json.gz")
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=1) as target:
            shutil.copyfileobj(source, target)
        for path in (plain, packed):
            print(f"{path.name:<16}{path.stat().st_size / 1e6:8.1f} MB   ", end="", flush=True)
            subprocess.run([sys.executable, "-c", READ, str(path)], check=True)


if __name__ == "__main__":
    main()
