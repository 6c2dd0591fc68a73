"""Two other ways to ask what FSDP will do, measured in the same run: what each answers, and how long it takes.

llm-analysis (PyPI) is a calculator: closed formulas for the step time and memory of ZeRO-3. It goes into a virtual
environment of its own (``--install``), which is thrown away. torch's ``FSDPMemTracker`` runs the real ``fully_shard``
on fake tensors and tells the peak of memory. With ``--accuracy`` the step times of the published llm-foundry rows are
predicted too: by llm-analysis with one efficiency per GPU, fitted to the very rows it is judged by, and by the
simulator.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests.measure, when called as a script

from fsdp_sim import Cluster, Model, Plan, simulate
from fsdp_sim.validate import fitting_rows, prediction, read_csv

GIB = 2**30
BF16 = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
CONFIGURATIONS = {
    "GPT-2 124M, micro-batch 8": ("gpt2-124m", Plan(micro_batch=8, **BF16)),
    "GPT-2 350M, micro-batch 8, checkpointed": (
        "gpt2-350m", Plan(micro_batch=8, activation_checkpointing="full", **BF16),
    ),
}  # fmt: skip
CLUSTER = Cluster("A100-SXM-80GB", gpus=8)
EFFICIENCIES = [round(0.2 + 0.01 * n, 2) for n in range(61)]

PEER = """
import dataclasses, json, logging, sys, time
logging.disable(logging.CRITICAL)
from llm_analysis.analysis import ActivationRecomputation, DSZeRO, LLMAnalysis
from llm_analysis.config import ModelConfig, ParallelismConfig, get_gpu_config_by_name

def result(row, efficiency):
    model = ModelConfig("model", row["n_layer"], row["n_head"], row["d_model"], row["vocab"], row["seq_len"],
                        row["n_kv_head"], ffn_embed_dim=row["d_ffn"], expansion_ratio=row["d_ffn"] / row["d_model"])
    # it refuses what it believes not to fit, so it gets memory without end, and what it needs is compared afterwards
    gpu = dataclasses.replace(get_gpu_config_by_name(row["gpu"]), mem_per_GPU_in_GB=1e6)
    analysis = LLMAnalysis(model, gpu,
                           parallelism_config=ParallelismConfig(dp_size=row["gpus"]), flops_efficiency=efficiency)
    again = ActivationRecomputation.FULL if row["checkpointed"] else ActivationRecomputation.NONE
    return analysis.training(batch_size_per_gpu=row["micro_batch"], gradient_accumulation_steps=row["grad_accum"],
                             seq_len=row["seq_len"], ds_zero=DSZeRO.STAGE_3, activation_recomputation=again,
                             mlp_gated_linear_units=row["swiglu"])

asked = json.load(sys.stdin)
answers = []
for row in asked["rows"]:
    of_row = []
    for efficiency in asked["efficiencies"]:
        start = time.perf_counter()
        found = result(row, efficiency)
        memory = found["(weight+op_state+grad+act)_memory_per_gpu"]
        of_row.append([found["latency_per_iter"], memory, time.perf_counter() - start])
    answers.append(of_row)
json.dump(answers, sys.stdout)
"""


@dataclass
class Answer:
    """What a tool says of one configuration; None is what it does not tell."""

    tool: str
    latency_s: float
    step_time_s: float | None
    peak_bytes: float | None
    events: int | None


# ---- llm-analysis ------------------------------------------------------------------------------------------------


def install(folder: Path) -> Path | str:
    """The Python of a virtual environment with llm-analysis, or why there is none."""
    python = folder / "bin" / "python"
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "llm-analysis"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return (done.stderr or done.stdout).strip().splitlines()[-1]
    return python


def peer_row(model: Model, plan: Plan, cluster: Cluster) -> dict[str, Any]:
    """A request as llm-analysis is asked."""
    gpu = cluster.gpu.name.lower()
    return {
        "n_layer": model.n_layer, "n_head": model.n_head, "n_kv_head": model.kv_heads, "d_model": model.d_model,
        "d_ffn": model.d_ffn, "vocab": model.vocab, "swiglu": model.ffn_type == "swiglu", "seq_len": plan.seq_len,
        "micro_batch": plan.micro_batch, "grad_accum": plan.grad_accum, "gpus": cluster.gpus, "gpu": gpu,
        "checkpointed": plan.activation_checkpointing == "full",
    }  # fmt: skip


def ask_peer(python: Path, rows: Sequence[dict[str, Any]], efficiencies: Sequence[float]) -> np.ndarray:
    """(rows, efficiencies, 3): seconds of a step, bytes, and the seconds it took to say so."""
    asked = json.dumps({"rows": list(rows), "efficiencies": list(efficiencies)})
    done = subprocess.run([str(python), "-c", PEER], input=asked, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return np.array(json.loads(done.stdout))


# ---- the table ---------------------------------------------------------------------------------------------------


def ours(model: Model, plan: Plan, runs: int) -> Answer:
    simulate(model, CLUSTER, plan)
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        sim = simulate(model, CLUSTER, plan)
        found = sim.step_time_s, sim.peak_memory_bytes
        times.append(time.perf_counter() - start)
    return Answer("fsdp_sim", statistics.median(times), *found, len(sim.timeline))


def tracker(model: Model, plan: Plan) -> Answer:
    """torch's memory tracker, importing torch apart."""
    from tests.measure.mem_tracker import gpt_of, tracked, tokens_of  # noqa: I001
    import torch.nn.functional as F
    from torch import nn

    class WithLoss(nn.Module):
        """Returns the loss, as the tracker's training step expects it."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = gpt_of(model)
            self.layers = self.inner.layers

        def forward(self, *inputs: Any) -> Any:
            found = self.inner(*inputs)
            return found if found.ndim == 0 else F.cross_entropy(found.float().flatten(0, 1), inputs[1].flatten())

    tokens_of(plan)
    start = time.perf_counter()
    snapshot = tracked(WithLoss, plan, CLUSTER.gpus)
    return Answer("torch FSDPMemTracker", time.perf_counter() - start, None, snapshot["Total"], None)


def answers(python: Path | str, runs: int, console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("configuration, 8 x A100-80GB", "tool"):
        table.add_column(name)
    for name in ("one evaluation", "step time", "peak memory", "events of a timeline"):
        table.add_column(name, justify="right")
    for name, (model_name, plan) in CONFIGURATIONS.items():
        model = Model.preset(model_name)
        found: list[Answer] = [ours(model, plan, runs)]
        if isinstance(python, Path):
            told = ask_peer(python, [peer_row(model, plan, CLUSTER)] * runs, [0.5])
            step_s, n_bytes, _ = told[0, 0]
            found.append(Answer("llm-analysis", float(np.median(told[:, 0, 2])), step_s, n_bytes, None))
        found.append(tracker(model, plan))
        for answer in found:
            table.add_row(
                name, answer.tool, _said(answer.latency_s, lambda s: f"{s * 1e3:,.1f} ms"),
                _said(answer.step_time_s, lambda s: f"{s * 1e3:,.1f} ms"),
                _said(answer.peak_bytes, lambda b: f"{b / GIB:.2f} GiB"), _said(answer.events, lambda n: f"{n:,}"),
            )  # fmt: skip
            name = ""
    console.print(table)
    if not isinstance(python, Path):
        console.print(f"llm-analysis is left out: {python}")


def _said(value: Any, how: Callable[[Any], str]) -> str:
    return "does not tell" if value is None else how(value)


def accuracy(python: Path | str, console: Console) -> None:
    """Errors of step time on the llm-foundry rows."""
    rows = fitting_rows(read_csv())
    measured = np.array([row.step_time_s for row in rows], dtype=float)
    gpus = np.array([row.cluster.gpu.name for row in rows])
    sims = [prediction(row) for row in rows]
    predicted = {"fsdp_sim (its numbers are fitted to these rows)": np.array([sim.step_time_s for sim in sims])}
    refused = {"fsdp_sim": sum(not sim.fits for sim in sims)}
    if isinstance(python, Path):
        asked = [peer_row(row.model, row.plan, row.cluster) for row in rows]
        told, needed, _ = np.moveaxis(ask_peer(python, asked, EFFICIENCIES), -1, 0)
        refused["llm-analysis"] = int(sum(needed[:, 0] > [row.cluster.gpu.mem_bytes for row in rows]))
        best = np.empty(len(rows))
        for gpu in dict.fromkeys(gpus):
            own = gpus == gpu
            errors = np.abs(told[own] / measured[own, None] - 1).mean(axis=0)
            chosen = int(errors.argmin())
            console.print(f"llm-analysis, {gpu}: efficiency {EFFICIENCIES[chosen]} of {own.sum()} rows")
            best[own] = told[own, chosen]
        predicted["llm-analysis (one efficiency per GPU, fitted to these rows)"] = best
    table = Table(f"step time of {len(rows)} llm-foundry rows", "mean", "median", "90th percentile", "worst", box=None)
    for name, seconds in predicted.items():
        error = np.abs(seconds / measured - 1)
        figures = (error.mean(), np.median(error), np.quantile(error, 0.9), error.max())
        table.add_row(name, *(f"{figure:.1%}" for figure in figures))
    console.print(table)
    for tool, count in refused.items():
        console.print(f"{tool}: {count} of {len(rows)} runs, all of which fitted, are predicted not to fit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--install", action="store_true", help="install llm-analysis from PyPI into a folder of its own"
    )
    parser.add_argument("--python", type=Path, help="an interpreter that has llm-analysis already")
    parser.add_argument("--accuracy", action="store_true", help="also the errors on the published rows")
    parser.add_argument("--runs", type=int, default=15)
    chosen = parser.parse_args()
    console = Console(width=150)
    with tempfile.TemporaryDirectory() as folder:
        python: Path | str = "not asked for (--install)"
        if chosen.python:
            python = chosen.python
        elif chosen.install:
            python = install(Path(folder) / "venv")
        answers(python, chosen.runs, console)
        if chosen.accuracy:
            accuracy(python, console)


if __name__ == "__main__":
    main()
