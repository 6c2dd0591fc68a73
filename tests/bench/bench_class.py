"""How a class on one shared machine feels: a kernel for each learner, who runs cells of the course and thinks between.

All begin at the same moment, which is the worst: a kernel, the imports of a first cell, and the first ranks. When
everyone has come that far, the lesson begins.

    python -m tests.bench.bench_class                        1, 5, 10 and 20 learners, two minutes each
    python -m tests.bench.bench_class --learners 20 --think-s 30
    python -m tests.bench.bench_class --ranks 4

Printed for each cell and number of learners: median and 95th percentile of its seconds, how often it was run and
failed; and the memory in use. It needs a machine on which nothing else runs.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field

import psutil
import tyro
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

SETUP = """
from fsdp_sim import Cluster, Plan, simulate, viz
from fsdp_sim.learn import check
from fsdp_sim.ranks import run
import torch
import torch.distributed as dist
cluster = Cluster("H100-SXM-80GB", gpus=64)

def summed():
    x = torch.ones(1000)
    dist.all_reduce(x)
    return float(x[0])

def all_gathers_per_step(layers, reshard_after_forward):
    return layers + 1
"""
CELLS = {
    "simulate 70B": 'sim = simulate("llama3-70b", cluster, Plan(seq_len=8192, param_dtype="bf16"))\nsim.step_time_s',
    "figure": 'viz.timeline(simulate("llama3-8b", cluster, Plan(seq_len=8192)).timeline).figure.to_json()[:0]',
    "ranks": "assert list(run(summed, {ranks}, progress=False)) == [{ranks}.0] * {ranks}",
    "check": 'check("all_gathers_per_step", all_gathers_per_step).passed',
}
START, FIRST = "start and import", "until first ranks"
TIMEOUT_S = 300.0


@dataclass
class Measured:
    """Seconds of each cell, failures by cell, and the most memory in use while all worked."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    failures: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    memory_bytes: int = 0


def learner(seed: int, minutes: float, think_s: float, ranks: int, begin: threading.Barrier, found: Measured) -> None:
    """One kernel from its start until the class is over."""
    draw = random.Random(seed)
    manager = KernelManager(kernel_name="python3")
    began_s = time.monotonic()
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=TIMEOUT_S)
        _cell(client, START, SETUP, found, began_s)
        _cell(client, FIRST, CELLS["ranks"].replace("{ranks}", str(ranks)), found, began_s)
        begin.wait(TIMEOUT_S)
        until_s = time.monotonic() + 60 * minutes
        time.sleep(draw.uniform(0, think_s))
        while time.monotonic() < until_s:
            name = draw.choice(list(CELLS))
            _cell(client, name, CELLS[name].replace("{ranks}", str(ranks)), found, time.monotonic())
            time.sleep(draw.expovariate(1 / think_s))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def _cell(client: BlockingKernelClient, name: str, code: str, found: Measured, began_s: float) -> None:
    reply = client.execute_interactive(code, timeout=TIMEOUT_S, output_hook=lambda message: None)
    found.seconds[name].append(time.monotonic() - began_s)
    found.failures[name] += reply["content"]["status"] != "ok"


def lesson(learners: int, minutes: float, think_s: float, ranks: int) -> Measured:
    """So many learners at once."""
    found, before = Measured(), psutil.virtual_memory().available
    begin = threading.Barrier(learners)
    threads = [
        threading.Thread(target=learner, args=(seed, minutes, think_s, ranks, begin, found)) for seed in range(learners)
    ]
    for thread in threads:
        thread.start()
    with tqdm(desc=f"{learners} learners", unit="s") as bar:
        while any(thread.is_alive() for thread in threads):
            time.sleep(1)
            bar.update(1)
            found.memory_bytes = max(found.memory_bytes, before - psutil.virtual_memory().available)
    return found


def main(learners: tuple[int, ...] = (1, 5, 10, 20), minutes: float = 2, think_s: float = 15, ranks: int = 2) -> None:
    """Print how long cells take, by the number of learners.

    Args:
        think_s: mean seconds between two cells of a learner.
        ranks: of each call of ``run``.
    """
    lessons = {n: lesson(n, minutes, think_s, ranks) for n in learners}
    table = Table(
        "cell", *(f"{n} learners" for n in learners), title=f"seconds: median, 95th percentile; {ranks} ranks"
    )
    for name in (START, FIRST, *CELLS):
        cells = []
        for found in lessons.values():
            took = sorted(found.seconds[name])
            p95 = took[min(len(took) - 1, round(0.95 * len(took)))] if took else 0.0
            failed = f", {found.failures[name]} failed" if found.failures[name] else ""
            cells.append(f"{statistics.median(took):.1f}, {p95:.1f} ({len(took)}{failed})" if took else "-")
        table.add_row(name, *cells)
    table.add_row("memory, GiB", *(f"{found.memory_bytes / 2**30:.1f}" for found in lessons.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    tyro.cli(main)
