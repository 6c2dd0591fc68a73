"""The checklist of someone who has just made a training loop run under FSDP, checked by running it here.

    python -m labs.experiments.checklist                        2, 4 and 8 ranks, a small GPT
    python -m labs.experiments.checklist --ranks 2 4            fewer
    python -m labs.experiments.checklist --model gpt2 --seq-len 512 --rows 16        on GPUs, something larger

Every line trains for real under torchrun and compares numbers. All runs are on GPUs when there is one for each of the
most ranks, else all on CPUs. The last lines say on which hardware that was, and what such hardware cannot show.
Exit status: 0 when all was verified, 1 when something was not, 2 when asked wrongly.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import torch
import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from fsdp_sim.words import human_bytes
from labs.checkpoint import Checkpointer
from labs.cluster.process_group import n_ranks
from labs.cluster.torchrun import FailedError, TrainingRun
from labs.experiments.checklist_runs import ChecklistOptions, Runs, falls, same

COMPILED_CLOSE = CLIPPED_CLOSE = 1e-4
BF16_CLOSE = 0.02


# ---- The lines of the list ------------------------------------------------------------------------------------------

Check = Callable[[], str]


def checks(runs: Runs) -> Iterator[tuple[str, Check]]:
    """What is to be verified and how; a check returns what it saw, or raises `FailedError`."""
    few = min(runs.options.ranks)

    def single() -> TrainingRun:
        return runs.run(1, "--api=single")

    def like_one(ranks: int, *arguments: str) -> str:
        one = single()
        return same("the losses of one process", runs.run(ranks, *arguments).losses, one.losses)

    def like_ddp() -> str:
        sharded = runs.run(few)
        return same("the losses of DDP", sharded.losses, runs.run(few, "--api=ddp").losses)

    yield "one process, no FSDP", lambda: falls(single().losses)
    for ranks in runs.options.ranks:
        yield f"{n_ranks(ranks)}, FSDP2", partial(like_one, ranks)
    yield "loss like DDP's", like_ddp
    yield "FSDP1 too", partial(like_one, few, "--api=fsdp1")
    yield "memory is divided by the ranks", lambda: _memory(runs, max(runs.options.ranks))
    yield "a checkpoint is written", lambda: _saved(runs.run(few))
    yield "and gone on from, bit for bit", lambda: _resumed(runs, few)
    yield "and by one process", lambda: _resumed_elsewhere(runs, few)
    yield "torch.compile", lambda: _compiled(runs, few)
    yield "clipping", lambda: _clipping(runs, few)
    yield "mixed precision, bf16", lambda: _bf16(runs, few)


def _memory(runs: Runs, ranks: int) -> str:
    alone, each = runs.run(1, "--api=single").report["state_bytes"], runs.run(ranks).report["state_bytes"]
    share = max(each) / alone[0]
    if not share < 1.15 / ranks:
        raise FailedError(f"a rank of {ranks} keeps {share:.1%} of what one process keeps")
    alone_mb, each_mb = alone[0] / 1e6, max(each) / 1e6
    return f"parameters and AdamW: {alone_mb:.2f} MB in one process, {each_mb:.2f} MB on each of {ranks} ranks"


def _saved(run: TrainingRun) -> str:
    found = Checkpointer(run.out / "checkpoints").newest()
    if found is None:
        raise FailedError(f"there is no checkpoint in {run.out}, or it is damaged")
    files = [path for path in found.path.rglob("*") if path.is_file()]
    n_bytes = sum(path.stat().st_size for path in files)
    return f"{found.path.name}, {human_bytes(n_bytes)} in {len(files)} files, their SHA-256 as in the manifest"


def _resumed(runs: Runs, ranks: int) -> str:
    whole, half = runs.run(ranks), runs.options.steps // 2
    second = runs.gone_on(half, ranks, ranks)
    _went_on_from(half, second)
    if second.losses != whole.losses:
        raise FailedError(f"losses differ from those of the uninterrupted run: {second.losses} and {whole.losses}")
    return f"stopped after step {half - 1}: the losses of steps {half} to {runs.options.steps - 1} are the very same"


def _resumed_elsewhere(runs: Runs, ranks: int) -> str:
    whole, half = runs.run(ranks), runs.options.steps // 2
    second = runs.gone_on(half, ranks, 1, "--api=single")
    _went_on_from(half, second)
    return same("the losses of the uninterrupted run", second.losses, whole.losses)


def _went_on_from(step: int, run: TrainingRun) -> None:
    """A run that began anew would have the same losses."""
    if run.report["resumed_from"] != step:
        raise FailedError(f"the second run went on from {run.report['resumed_from']}, not from step {step}")


def _compiled(runs: Runs, ranks: int) -> str:
    backend = "inductor" if has_compiler() else "aot_eager"
    eager = runs.run(ranks)
    compiled = runs.run(ranks, "--compile=true", f"--compile_backend={backend}")
    return f"{same('the losses of eager mode', compiled.losses, eager.losses, COMPILED_CLOSE)} ({backend})"


def has_compiler() -> bool:
    """What inductor needs: a C++ compiler on CPUs, Triton on GPUs."""
    return torch.cuda.is_available() or any(map(shutil.which, ("g++", "clang++")))


def _bf16(runs: Runs, ranks: int) -> str:
    whole, half = runs.run(ranks), runs.run(ranks, "--param_dtype=bf16")
    if half.losses == whole.losses:
        raise FailedError("the losses are those of fp32, bit for bit: nothing was computed in bf16")
    return same("the losses of fp32", half.losses, whole.losses, BF16_CLOSE)


def _clipping(runs: Runs, ranks: int) -> str:
    free = runs.run(1, "--api=single")
    most = min(free.norms) / 2
    alone = runs.run(1, "--api=single", f"--clip={most:.3g}")
    if alone.losses[1:] == free.losses[1:]:
        raise FailedError(f"losses are the same with and without clip={most:.3g}, and norms are {free.norms}")
    for api in ("fsdp2", "fsdp1"):
        run = runs.run(ranks, f"--api={api}", f"--clip={most:.3g}")
        same(f"the norms of one process ({api})", run.norms, alone.norms, CLIPPED_CLOSE)
        same(f"the losses of one process ({api})", run.losses, alone.losses, CLIPPED_CLOSE)
    return f"to {most:.3g}: the norm of all ranks' gradients ({alone.norms[0]:.3f}) is that of one process, FSDP1 too"


# ---- What was seen, and where ---------------------------------------------------------------------------------------


def hardware(device: str) -> str:
    """On what all runs were."""
    software = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        gpus = f"{torch.cuda.device_count()} x {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB each"
        return f"{gpus}, NCCL, CUDA {torch.version.cuda}; {software}"
    memory_gib = psutil.virtual_memory().total / 2**30
    return f"{os.cpu_count()} CPU cores ({platform.machine()}), {memory_gib:.0f} GiB, gloo; {software}"


def not_verified(options: ChecklistOptions) -> list[str]:
    """What runs on this hardware do not show."""
    cores, most = os.cpu_count() or 1, max(options.ranks)
    lines = []
    if options.device == "cpu":
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        have = f"{gpus} GPU{'s' * (gpus != 1)} for {n_ranks(most)}" if gpus else "no GPU"
        lines += [
            f"NCCL, CUDA streams and their overlap ({have}: all runs were on CPUs)",
            "bf16 as tensor cores compute it, and fp16 with its loss scaling (the trainer has fp16 on GPUs only)",
            "peak memory as a GPU's allocator sees it (only what each rank keeps was counted)",
        ]
    if not has_compiler():
        lines.append("torch.compile's inductor (no C++ compiler: aot_eager traced, and nothing was compiled)")
    lines.append("a network between machines (all ranks were on this one)")
    speed = f"{n_ranks(most)} shared {cores} cores" if options.device == "cpu" and most > cores else "runs were short"
    return [*lines, f"speed ({speed})"]


def main(options: ChecklistOptions) -> int:
    console = Console()
    try:
        options.check()
    except ValueError as error:
        console.print(f"labs.experiments.checklist: {error}", markup=False, soft_wrap=True)
        return 2
    table, start_s, failures = Table("verified", "", "what was seen", "seconds"), time.perf_counter(), 0
    with tempfile.TemporaryDirectory(prefix="checklist-") as folder:
        lines = list(checks(Runs(options, Path(folder))))
        for title, check in track(lines, "training", console=console, transient=True):
            line_s = time.perf_counter()
            try:
                answer, seen = "[green]yes[/]", check()
            except FailedError as failure:
                answer, seen, failures = "[red]NO[/]", str(failure), failures + 1
            table.add_row(title, answer, escape(seen), f"{time.perf_counter() - line_s:.0f}")
    console.print(table)
    console.print(f"{len(lines) - failures} of {len(lines)} verified in {time.perf_counter() - start_s:.0f} s "
                  f"(a run that several lines need is counted in the first), on", soft_wrap=True)  # fmt: skip
    console.print(f"  {hardware(options.device)}", markup=False, soft_wrap=True)
    console.print("Not verified here:")
    for line in not_verified(options):
        console.print(f"  {line}", markup=False, soft_wrap=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(ChecklistOptions, description=__doc__)))
