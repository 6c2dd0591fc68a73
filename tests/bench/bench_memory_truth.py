"""Predicted peak memory beside that of torch's FSDPMemTracker, for more and larger configurations than the tests have.

python -m tests.bench.bench_memory_truth [part of a name ...]
"""

from __future__ import annotations

import sys
import time

import torch
from rich.console import Console
from rich.table import Table

from fsdp_sim.cost.transformer import workload
from fsdp_sim.engine.memory import memory
from fsdp_sim.measure import model_from_module
from fsdp_sim.schedule import build
from tests.measure.mem_tracker import WORLD_SIZE, peak_by_the_rules, tokens_of, tracked
from tests.measure.test_memory_against_torch import BF16, CASES, Case, plan

LARGER = [
    Case(name, layers, plan(micro_batch, seq_len, checkpointing, reshard, **BF16))
    for name, layers, micro_batch, seq_len in (
        ("gpt2-124m", 12, 8, 1024),
        ("gpt2-350m", 24, 8, 1024),
        ("gpt2-1.5b", 48, 4, 1024),
        ("llama2-7b", 32, 2, 4096),
        ("llama3-8b", 32, 1, 8192),
    )
    for checkpointing in (None, "full")
    for reshard in (True, False)
]


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    table = Table(box=None)
    for column in (
        "model-layers-dtype-checkpointing-reshard",
        "torch GiB",
        "traced",
        "rules",
        "analytic",
        "rules",
        "seconds",
    ):
        table.add_column(column, justify="left" if column.startswith("model") else "right")
    for case in CASES + LARGER:
        if words and not any(word in str(case) for word in words):
            continue
        started = time.perf_counter()
        truth = tracked(case.build, case.plan)["Total"]
        cells = [str(case), f"{truth / 2**30:.2f}"]
        for work in (
            model_from_module(case.build, tokens_of(case.plan), plan=case.plan),
            workload(case.model, case.plan),
        ):
            program = build(work.units, case.plan, WORLD_SIZE)
            for peak in (memory(program, work).peak_bytes, sum(peak_by_the_rules(program, work).values())):
                cells.append(f"{peak / truth - 1:+.2%}")
        table.add_row(*cells, f"{time.perf_counter() - started:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
