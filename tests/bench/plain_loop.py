"""A training loop in one file, written without the trainer: what `bench_trainer` measures the trainer against.

The model and the kind of AdamW are the trainer's; the rest is the shortest loop that trains: random rows, forward,
backward, clip, step. It reads the loss only when it prints it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from labs.data import load_corpus
from labs.model import build, model_config


def plain_step(asked: argparse.Namespace) -> Callable[[bool], None]:
    """The model is built; each call is a step. ``look``: read the loss, as one does to print it."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    model = build(model_config(asked.model), seed=0).to(device)
    if asked.compile:
        for layer in model.layers:
            layer.compile()
        model.loss = torch.compile(model.loss)
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    tokens = load_corpus().train
    rng = np.random.default_rng(0)

    def step(look: bool) -> None:
        optimizer.zero_grad(set_to_none=True)
        for _ in range(asked.accumulate):
            at = rng.integers(0, len(tokens) - asked.seq_len - 1, asked.rows)
            rows = torch.from_numpy(np.stack([tokens[i : i + asked.seq_len + 1] for i in at]).astype(np.int64))
            if on_gpu:
                rows = rows.pin_memory().to(device, non_blocking=True)
            with torch.autocast("cuda", torch.bfloat16) if asked.bf16 else nullcontext():
                loss = model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) / asked.accumulate
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if look:
            loss.item()
            if on_gpu:
                torch.cuda.synchronize()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="teaching")
    parser.add_argument("--rows", type=int, default=8, help="rows per micro-batch")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--log-every", type=int, default=1)
    asked = parser.parse_args()
    step, times_s = plain_step(asked), []
    for i in range(asked.steps):
        start_s = time.perf_counter()
        step(i % asked.log_every == 0)
        times_s.append(time.perf_counter() - start_s)
    tail = times_s[len(times_s) // 4 :]
    step_s = statistics.median(tail) if asked.log_every == 1 else statistics.fmean(tail)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(json.dumps({"step_s": step_s, "peak_bytes": peak}))


if __name__ == "__main__":
    main()
