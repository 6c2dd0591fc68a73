"""What the trainer costs: its tokens per second over those of a plain loop with the same settings, side by side.

    python -m tests.bench.bench_trainer                 on CPUs: the teaching model, one process
    python -m tests.bench.bench_trainer --gpu           GPT-2 124M, bf16, compiled, rows of 1,024 tokens, on one GPU
    python -m tests.bench.bench_trainer --gpu --model gpt2-xl --rows 4

Both take turns, so that what else the machine does touches both. On CPUs, where a few percent are lost in what differs
from one process to the next, they do so step by step in one process: the plain loop's step runs at the beginning of
each of the trainer's. On a GPU each run is a process of its own, and there is a third: FSDP2 on one rank, which gathers
and reduces nothing and shows what its hooks cost.

Exit status: 0 when the aims are reached, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import labs.train
from labs.loop.step import StepOutcome
from tests.bench.plain_loop import plain_step

MOST_OVERHEAD = 0.03


def interleaved(asked: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of each step in one process: the plain loop's, and the trainer's with everything between two of them."""
    asked.accumulate, asked.bf16, asked.compile = 1, False, False
    step, plain_s, trainer_s = plain_step(asked), [], []
    real, left_s = labs.train.train_step, None

    def both(*arguments: Any, **options: Any) -> StepOutcome:
        nonlocal left_s
        start_s = time.perf_counter()
        if left_s is not None:
            trainer_s.append(start_s - left_s)
        step(True)
        left_s = time.perf_counter()
        plain_s.append(left_s - start_s)
        return real(*arguments, **options)

    labs.train.train_step = both
    try:
        with tempfile.TemporaryDirectory() as folder:
            status = labs.train.main(
                ["--api=single", f"--model={asked.model}", f"--global_batch={asked.rows}", f"--seq_len={asked.seq_len}",
                 f"--steps={asked.steps}", "--clip=1.0", "--lr=1e-4", "--device=cpu",
                 f"--metrics={folder}/metrics.jsonl"]
            )  # fmt: skip
    finally:
        labs.train.train_step = real
    if status:
        raise SystemExit(f"the trainer ended with status {status}")
    return plain_s[:-1], trainer_s


def on_cpus(asked: argparse.Namespace) -> bool:
    """Whether the trainer costs at most `MOST_OVERHEAD`."""
    plain_s, trainer_s = interleaved(asked)
    ratios = [trainer / plain for plain, trainer in zip(plain_s[5:], trainer_s[5:], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    console = Console()
    plain_ms, trainer_ms = (statistics.median(times_s) * 1e3 for times_s in (plain_s, trainer_s))
    console.print(f"Medians of {len(ratios)} steps each: plain loop {plain_ms:.2f} ms, trainer {trainer_ms:.2f} ms")
    half = f"half of the steps between {low - 1:+.1%} and {high - 1:+.1%}"
    aim = f"at most {MOST_OVERHEAD:.0%} is aimed for"
    console.print(f"Trainer over plain loop: {middle - 1:+.1%} ({half}; {aim})", soft_wrap=True)
    return middle - 1 <= MOST_OVERHEAD


def plain(asked: argparse.Namespace) -> float:
    """Seconds per step of the plain loop."""
    command = [sys.executable, "-m", "tests.bench.plain_loop", f"--model={asked.model}", f"--rows={asked.rows}",
               f"--seq-len={asked.seq_len}", f"--steps={asked.steps}", "--bf16", "--compile"]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["step_s"]


def trainer(asked: argparse.Namespace, api: str) -> float:
    """Seconds per step of the trainer, from its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        command = [sys.executable, "-m", "labs.train", f"--api={api}", f"--model={asked.model}",
                   f"--global_batch={asked.rows}", f"--seq_len={asked.seq_len}", f"--steps={asked.steps}",
                   "--clip=1.0", "--lr=1e-4", f"--metrics={metrics}", "--param_dtype=bf16",
                   "--compile=true"]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    times_s = [line["step_s"] for line in lines if "step_s" in line]
    return statistics.median(times_s[len(times_s) // 4 :])


def on_a_gpu(asked: argparse.Namespace) -> bool:
    """Whether the trainer is as fast as the plain loop, and FSDP2 on one rank nearly so."""
    apis = ["single", "fsdp2"]
    seconds: dict[str, list[float]] = {"plain loop": [], **{f"trainer, {api}": [] for api in apis}}
    for _ in range(asked.rounds):
        seconds["plain loop"].append(plain(asked))
        for api in apis:
            seconds[f"trainer, {api}"].append(trainer(asked, api))
    console, tokens = Console(), asked.rows * asked.seq_len
    table = Table("", "step (median)", "tokens/s", "tokens/s over the plain loop's: each round", "median")
    ratios = {}
    for name, mine in seconds.items():
        each = [p / m for p, m in zip(seconds["plain loop"], mine, strict=True)]
        ratios[name] = statistics.median(each)
        step_s = statistics.median(mine)
        table.add_row(
            name,
            f"{step_s * 1e3:.2f} ms",
            f"{tokens / step_s:,.0f}",
            " ".join(f"{r:.3f}" for r in each),
            f"{ratios[name]:.3f}",
        )
    console.print(table)
    hooks = ratios["trainer, fsdp2"] / ratios["trainer, single"]
    console.print(f"Trainer over plain loop: {ratios['trainer, single']:.3f} (aim: 1.0)")
    console.print(f"FSDP2 on one rank over no wrapping: {hooks:.3f} (aim: 0.97)")
    return ratios["trainer, single"] >= 1.0 and hooks >= 0.97


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int, help="60 per round on a GPU, else 300")
    parser.add_argument("--rounds", type=int, default=4, help="on a GPU")
    asked = parser.parse_args()
    asked.model = asked.model or ("gpt2" if asked.gpu else "teaching")
    asked.rows = asked.rows or (32 if asked.gpu else 8)
    asked.seq_len = asked.seq_len or (1024 if asked.gpu else 128)
    asked.steps = asked.steps or (60 if asked.gpu else 300)
    return 0 if (on_a_gpu if asked.gpu else on_cpus)(asked) else 1


if __name__ == "__main__":
    sys.exit(main())
