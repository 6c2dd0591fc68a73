"""``python -m tests.bench.bench_one_gpu``: steps of one GPU under torch's FSDP2 beside what the simulator says of them.

On a machine with a GPU they are measured, and what was measured is written to ``build/one_gpu.jsonl``; elsewhere those
of the recording beside this file are read (one H200, torch 2.11.0+cu130, 2026-11-27). The loop is the shortest there
is: one batch that stays on the GPU, no logging, AdamW without clipping. Every block is a unit, gathered in bf16 and
reduced in fp32. Seconds are the median of eight steps after four; bytes are torch's peaks of these eight.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsdp_sim import Cluster, Plan, simulate
from labs.gpu_day.sizes import LARGEST_FIRST

RECORDED = Path(__file__).with_name("one_h200.jsonl")
MEASURED = Path("build/one_gpu.jsonl")
NAMES = LARGEST_FIRST | {"llama-1b": "llama-3.2-1b"}
GIB = 2**30
Row = dict[str, Any]


def recorded() -> list[Row]:
    """What was asked and what was measured, a row for each configuration."""
    return [json.loads(line) for line in RECORDED.read_text().splitlines()]


def plan_of(row: Row) -> Plan:
    return Plan(
        stack="plain", param_dtype="bf16" if row["param_dtype"] else None, reduce_dtype="fp32",
        cross_entropy="compiled" if row["compile"] else "torch",
        **{name: row[name] for name in ("micro_batch", "seq_len", "activation_checkpointing", "compile",
                                        "optimizer_impl", "grad_accum")},
    )  # fmt: skip


def measured(rows: list[Row]) -> Iterator[Row]:
    """The same configurations on this machine's first GPU."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from labs.model.gpt import GPT, GPTConfig
    from labs.model.llama import PRESETS, Llama
    from labs.wrapping.checkpoint_and_compile import checkpoint_blocks, compile_blocks

    device = torch.device("cuda:0")
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    mesh = init_device_mesh("cuda", (1,))
    for row in rows:
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()
        with device:
            name = row["model"]
            model = Llama(PRESETS[name], seed=0) if name in PRESETS else GPT(GPTConfig.preset(name), seed=0)
            x = torch.randint(model.config.vocab_size, (row["micro_batch"], row["seq_len"]))
        checkpoint_blocks(model, row["activation_checkpointing"])
        if row["compile"]:
            compile_blocks(model, "inductor")
        policy = MixedPrecisionPolicy(torch.bfloat16 if row["param_dtype"] else None, torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        how = {row["optimizer_impl"]: True}
        optimizer, times_s = torch.optim.AdamW(model.parameters(), lr=1e-4, **how), []
        for number in range(12):
            if number == 4:
                torch.cuda.reset_peak_memory_stats()
            begin_s = time.perf_counter()
            optimizer.zero_grad()
            for _ in range(row["grad_accum"]):
                (model(x, x) / row["grad_accum"]).backward()
            optimizer.step()
            torch.cuda.synchronize()
            times_s.append(time.perf_counter() - begin_s)
        peaks = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        gpu = torch.cuda.get_device_name()
        yield row | peaks | {"step_s": statistics.median(times_s[4:]), "gpu": gpu, "torch": torch.__version__}
        del model, optimizer
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=MEASURED, help="where to write what is measured")
    out, rows = parser.parse_args().out, recorded()
    if torch.cuda.is_available():
        out.parent.mkdir(exist_ok=True)
        with out.open("w") as file:
            rows = []
            for row in measured(recorded()):
                rows.append(row)
                file.write(f"{json.dumps(row)}\n")
                file.flush()
    print(f"{rows[0]['gpu']}, torch {rows[0]['torch']}\n")
    header = ("model", "micro-batch", "how", "step, ms", "predicted", "between steps", "allocated, GiB", "predicted",
              "reserved", "predicted")  # fmt: skip
    print(f"| {' | '.join(header)} |\n|{' --- |' * 3}{' ---: |' * 7}")
    errors: dict[str, list[float]] = {name: [] for name in ("step", "step, nothing between", "allocated", "reserved")}
    inside = 0
    for row in rows:
        sim = simulate(NAMES[row["model"]], Cluster(row["gpu"].removeprefix("NVIDIA "), gpus=1), plan_of(row))
        kept, busy_s = row["activation_checkpointing"], sim.step_time_s - sim.between_steps_s
        how = [
            "compiled" if row["compile"] else "eager",
            "bf16" if row["param_dtype"] else "fp32",
            row["optimizer_impl"],
        ]
        how += [f"checkpointing {kept}"] * bool(kept) + [f"{row['grad_accum']} micro-batches"] * (row["grad_accum"] > 1)
        peak, reserved = sim.memory.peak_bytes, sim.memory.reserved_bytes
        print(
            f"| {NAMES[row['model']]} | {row['micro_batch']} x {row['seq_len']} | {', '.join(how)} | "
            f"{1e3 * row['step_s']:.0f} | {1e3 * sim.step_time_s:.0f} | {1e3 * sim.between_steps_s:.0f} | "
            f"{row['allocated'] / GIB:.2f} | {peak / GIB:.2f} | {row['reserved'] / GIB:.2f} | {reserved / GIB:.2f} |"
        )
        low_s, high_s = sim.step_time_interval_s
        inside += low_s <= row["step_s"] <= high_s
        ours = (sim.step_time_s, busy_s, peak, reserved)
        theirs = (row["step_s"], row["step_s"], row["allocated"], row["reserved"])
        for name, predicted, found in zip(errors, ours, theirs, strict=True):
            errors[name].append(predicted / found - 1)
    print(f"\n- {inside} of {len(rows)} steps lie in the interval of their prediction")
    for name, off in errors.items():
        size = np.abs(off)
        print(f"- {name}: {np.mean(off):+.1%} on average, absolute errors {size.mean():.1%} (90th percentile "
              f"{np.quantile(size, 0.9):.1%})")  # fmt: skip


if __name__ == "__main__":
    main()
