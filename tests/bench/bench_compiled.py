"""How much faster the engine is in the wheel of ``make compiled``: ``python -m tests.bench.bench_compiled WHEEL``.

Both are measured in turn, in processes of their own. CPU time, of several rounds the least: a prediction whose program
is known, and plans of a sweep, their programs included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import fsdp_sim

MEASURE = """
import itertools, json, time
from fsdp_sim import Cluster, Plan, simulate
from fsdp_sim.explore.sweep import row_of

def cpu_s(work):
    start = time.process_time()
    work()
    return time.process_time() - start

def predict():
    sim = simulate("llama3-8b", cluster, plan)
    return sim.step_time_s, sim.exposed_comm_s, sim.peak_memory_bytes

cluster, plan = Cluster("H100", gpus=64), Plan(seq_len=8192, param_dtype="bf16", forward_prefetch=2)
vary = {
    "gpus": ("8", "64", "512"), "micro_batch": ("1", "2", "4", "8"), "seq_len": ("1024", "4096", "16384"),
    "forward_prefetch": ("none", "1", "2", "3"), "activation_checkpointing": ("none", "selective", "2", "full"),
}
texts = {"model": "llama3-8b", "gpu": "H100", "param_dtype": "bf16"}
plans = [texts | dict(zip(vary, values)) for values in itertools.product(*vary.values())]
sweep_s = cpu_s(lambda: [row_of(one, False) for one in plans])
print(json.dumps({"a prediction": min(cpu_s(predict) for _ in range(50)), "a plan of a sweep": sweep_s / len(plans)}))
"""


def measured(folder: Path) -> dict[str, float]:
    """Seconds of CPU time on the package in a folder."""
    ran = subprocess.run([sys.executable, "-c", MEASURE], cwd=folder, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(ran.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="of `make compiled`")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(chosen.wheel).extractall(folder)
        source = Path(fsdp_sim.__file__).parents[1]
        rounds = [(measured(source), measured(Path(folder))) for _ in range(chosen.rounds)]
    for name in rounds[0][0]:
        plain_s, compiled_s = (min(of[side][name] for of in rounds) for side in (0, 1))
        ratio = plain_s / compiled_s
        print(f"{name}: {plain_s * 1e3:.2f} ms, compiled {compiled_s * 1e3:.2f} ms: {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
