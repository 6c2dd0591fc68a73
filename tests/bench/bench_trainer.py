"""What the trainer costs: its tokens per second over those of a plain loop with the same settings, side by side.

    python -m tests.bench.bench_trainer                 on CPUs: the teaching model, one process
    python -m tests.bench.bench_trainer --gpu           GPT-2 124M, bf16, compiled, rows of 1,024 tokens, on one GPU
    python -m tests.bench.bench_trainer --gpu --model gpt2-xl --rows 4

Rounds are interleaved (plain, trainer, plain, ...), so that what else the machine does touches both. On a GPU there is
a third: FSDP2 on one rank, which gathers and reduces nothing and shows what its hooks cost.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

MOST_OVERHEAD = 0.03


def plain(asked: argparse.Namespace) -> float:
    """Seconds per step of the plain loop."""
    flags = ["--bf16", "--compile"] if asked.gpu else []
    command = [sys.executable, "-m", "tests.bench.plain_loop", f"--model={asked.model}", f"--rows={asked.rows}",
               f"--seq-len={asked.seq_len}", f"--steps={asked.steps}", *flags]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["step_s"]


def trainer(asked: argparse.Namespace, api: str) -> float:
    """Seconds per step of the trainer, from its metrics."""
    flags = ["--param_dtype=bf16", "--compile=true"] if asked.gpu else ["--device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        command = [sys.executable, "-m", "labs.train", f"--api={api}", f"--model={asked.model}",
                   f"--global_batch={asked.rows}", f"--seq_len={asked.seq_len}", f"--steps={asked.steps}",
                   "--clip=1.0", "--lr=1e-4", f"--metrics={metrics}", *flags]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, text=True)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    times_s = [line["step_s"] for line in lines if "step_s" in line]
    return statistics.median(times_s[len(times_s) // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--model")
    parser.add_argument("--rows", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=4)
    asked = parser.parse_args()
    asked.model = asked.model or ("gpt2" if asked.gpu else "teaching")
    asked.rows = asked.rows or (32 if asked.gpu else 8)
    asked.seq_len = asked.seq_len or (1024 if asked.gpu else 128)

    apis = ["single", "fsdp2"] if asked.gpu else ["single"]
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
    overhead = 1 / ratios["trainer, single"] - 1
    console.print(
        f"Overhead of the trainer over the plain loop: {overhead:+.1%} (at most {MOST_OVERHEAD:.0%} is aimed for)"
    )
    if asked.gpu:
        hooks = ratios["trainer, fsdp2"] / ratios["trainer, single"]
        console.print(f"FSDP2 on one rank over no wrapping: {hooks:.3f} (aim: 0.97)")


if __name__ == "__main__":
    main()
