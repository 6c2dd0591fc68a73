"""A checkpoint, a rank killed in the middle of the next one, and runs that go on: on fewer ranks, with another api.

    python -m labs.experiments.resume                       two ranks of torchrun, on CPU cores
    python -m labs.experiments.resume --ranks 4 --where after-shard-write
    python -m labs.experiments.resume --device cuda         on GPUs, with algorithms that give the same bits each time

First what a checkpoint weighs and how long it takes is predicted. Then torchrun trains, rank 0 is killed (SIGKILL) in
the middle of a save, and one looks at what is on the disk. From there three runs go on: on the same ranks, on one rank
without FSDP, and with FSDP1; and once more from the start torchrun itself starts the ranks anew. All of them should
have the losses of a run that nobody disturbed.

Exit status: 0 done, 1 a training failed, 2 asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
import torch.distributed as dist
import tyro

from fsdp_sim import ranks as processes
from labs.checkpoint import Checkpointer
from labs.checkpoint.folder import CHECKPOINT, survey
from labs.checkpoint.hashing import write_file
from labs.checkpoint.index import read_index
from labs.checkpoint.manifest import MANIFEST, read_manifest
from labs.checkpoint.rng import read_rng
from labs.checkpoint.state import read_state
from labs.cluster.process_group import RankPlace, n_ranks, ranks_on
from labs.cluster.torchrun import FailedError, TrainingRun, launch, train
from labs.config import TrainConfig
from labs.experiments.command import command
from labs.experiments.result import LabResult, ResultRow, this_machine
from labs.loop.failpoints import VARIABLE
from labs.loop.optimizer import make_optimizer
from labs.loop.preflight import CHECKPOINTS
from labs.model import ModelConfig, empty
from labs.wrapping import wrap

SAVE_EVERY = 2
STEPS = 8
KILLED_AT = 4
"""The step whose checkpoint is being written."""
SETTING = (
    "--n_layer=2", f"--steps={STEPS}", f"--save_every={SAVE_EVERY}", "--global_batch=8", "--seq_len=64",
)  # fmt: skip
SAME_BITS = ("--deterministic=true",)
"""On GPUs, where attention's backward may add in any order."""
MODEL = TrainConfig(n_layer=2).model_config
SAVES = 5
"""Of which the median counts."""
Where = Literal["before-shard-write", "after-shard-write", "before-manifest", "before-rename"]


# ---- What a checkpoint weighs, and how long it takes ----------------------------------------------------------------


def predict_bytes(model: ModelConfig) -> int:
    """Of the tensors in a checkpoint, over all ranks' files: a parameter and AdamW's two moments in fp32, and of each
    parameter tensor one number more, how often it was stepped. No matter how many ranks wrote it.
    """
    params = list(empty(model).parameters())
    return 12 * sum(p.numel() for p in params) + 4 * len(params)


def tensor_bytes(checkpoint: Path) -> int:
    """The same, by its manifest."""
    files = read_manifest(checkpoint).files
    return sum(files[name].size_bytes for name in read_index(checkpoint).files)


def predict_s(checkpoint: Path, folder: Path) -> float:
    """Seconds to write files as large as those of a checkpoint, by as many ranks: what the disk alone takes.

    Each rank writes its two; then rank 0 writes the three that say what is where.
    """
    files = read_manifest(checkpoint).files
    sizes = {name: info.size_bytes for name, info in files.items()}
    shards = sorted(name for name in sizes if name.startswith("shard-"))
    after = [name for name in sizes if name.endswith(".json")]

    def write(turn: int, names: Sequence[str]) -> None:
        for name in names:
            write_file(folder / f"{turn}-{name}", [bytes(sizes[name])])

    def save() -> float:
        rank, took_s = dist.get_rank(), []
        for turn in range(SAVES):
            dist.barrier()
            since_s = time.perf_counter()
            write(turn, [shards[rank], f"rank-{rank}.safetensors"])
            dist.barrier()
            if rank == 0:
                write(turn, after)
            dist.barrier()
            took_s.append(time.perf_counter() - since_s)
        return statistics.median(took_s)

    return float(processes.run(save, len(shards), threads=1, timeout_s=60, progress=False)[0])


def save_s(ranks: int, folder: Path) -> float:
    """Seconds that a save takes on CPU cores; training waits meanwhile, unless ``async_save`` is true."""

    def save() -> float:
        rank, config = dist.get_rank(), TrainConfig(n_layer=MODEL.n_layer)
        wrapped = wrap(config, MODEL, RankPlace(rank, ranks, rank, ranks), torch.device("cpu"))
        optimizer = make_optimizer(wrapped, config)
        checkpointer = Checkpointer(folder / "saves", group=dist.new_group(backend="gloo"))
        took_s = []
        for step in range(SAVES):
            state = read_state(wrapped.model, optimizer)
            dist.barrier()
            since_s = time.perf_counter()
            checkpointer.save(step, state, {"step": step}, read_rng())
            took_s.append(time.perf_counter() - since_s)
        return statistics.median(took_s)

    return float(processes.run(save, ranks, threads=1, timeout_s=60, progress=False)[0])


# ---- Killing it, and looking at the disk ----------------------------------------------------------------------------


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder among the checkpoints.

    Attributes:
        counts: whether a run would go on from it.
        why: if not.
    """

    name: str
    files: int
    bytes: int
    counts: bool
    why: str


def on_disk(out: Path) -> list[CheckpointFolder]:
    """What a run left in its folder of checkpoints, oldest first. The random end of a temporary name is left out."""
    found = []
    for path in sorted((out / CHECKPOINTS).glob("step-*")):
        files = list(path.iterdir())
        wrong = survey(path)[1] if CHECKPOINT.fullmatch(path.name) else ["it has not the name of a checkpoint"]
        name = re.sub(r"\.tmp-\w+", ".tmp-…", path.name)
        n_bytes = sum(file.stat().st_size for file in files)
        found.append(CheckpointFolder(name, len(files), n_bytes, not wrong, "; ".join(wrong)))
    return found


def setting(device: str) -> tuple[str, ...]:
    """What all runs are asked for."""
    return SETTING + (SAME_BITS if device == "cuda" else ())


def kill(out: Path, *, ranks: int = 2, where: Where = "before-rename", device: str = "cpu") -> str:
    """Train until rank 0 kills itself in the middle of a save; torchrun ends the others. Returns what it said.

    Raises:
        FailedError: it was not killed.
    """
    try:
        train(*setting(device), ranks=ranks, device=device, out=out, env=_faults(where))
    except FailedError as failure:
        if not any(one.name.startswith(f"step-{KILLED_AT}.tmp") for one in on_disk(out)):
            raise
        return str(failure)
    raise FailedError(f"rank 0 was to be killed at {where} of step {KILLED_AT}, and was not")


def _faults(where: Where) -> dict[str, str]:
    return {VARIABLE: f"kill:{where}@{KILLED_AT}@0"}


def restarted(
    out: Path, *, ranks: int = 2, where: Where = "before-rename", device: str = "cpu"
) -> list[float]:  # fmt: skip
    """The same with ``torchrun --max-restarts=1``, which starts all ranks anew. Returns the losses of all steps.

    Raises:
        FailedError: it did not get to the end.
    """
    command = ("--max-restarts=1", "-m", "labs.train", *setting(device), f"--device={device}", f"--out={out}")
    launch(*command, ranks=ranks, device=device, env=_faults(where))
    lines = [msgspec.json.decode(line) for line in (out / "metrics.jsonl").read_bytes().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def goes_on(killed: Path, folder: Path, *arguments: str, ranks: int, device: str = "cpu") -> TrainingRun:
    """A run that goes on in a copy of what is on the disk.

    Args:
        folder: where the copy goes; it is not there yet.

    Raises:
        FailedError: it failed.
    """
    shutil.copytree(killed, folder)
    return train(*setting(device), *arguments, ranks=ranks, device=device, out=folder)


def furthest(losses: Sequence[float], of: Sequence[float]) -> float:
    """The largest relative difference; 0 if every bit is equal."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, of, strict=True))


# ---- The lab --------------------------------------------------------------------------------------------------------


def checkpoint_rows(checkpoint: Path, ranks: int, folder: Path) -> list[ResultRow]:
    """Bytes and seconds of one save."""
    predicted_s = predict_s(checkpoint, folder)
    return [
        ResultRow("checkpoint", "tensors", predict_bytes(MODEL) / 1e6, tensor_bytes(checkpoint) / 1e6, "MB"),
        ResultRow("checkpoint", "time of a save", 1e3 * predicted_s, 1e3 * save_s(ranks, folder), "ms"),
    ]


def run(ranks: int | None = None, where: Where = "before-rename", device: Literal["cpu", "cuda"] = "cpu") -> LabResult:
    """All of it.

    Args:
        ranks: by default 2, or one on each GPU.

    Raises:
        ValueError: ranks that do not divide the rows; GPUs that are missing. FailedError: a training failed, or one
            that was to be killed was not. RanksError: a save that was timed failed.
    """
    ranks = ranks_on(device, ranks, rows=8)
    if ranks < 1 or 8 % ranks:
        raise ValueError(f"ranks={ranks} does not divide the 8 rows of a batch; use 1, 2, 4 or 8")
    with tempfile.TemporaryDirectory(prefix="resume-") as temporary:
        folder = Path(temporary)
        whole = train(*setting(device), ranks=ranks, device=device, out=folder / "whole")
        newest = folder / "whole" / CHECKPOINTS / f"step-{STEPS}"
        rows = checkpoint_rows(newest, ranks, folder)
        kill(folder / "killed", ranks=ranks, where=where, device=device)
        left = on_disk(folder / "killed")
        rows.append(ResultRow("killed", "checkpoints that count", 1, sum(one.counts for one in left), ""))
        for name, on, arguments in (
            (f"{n_ranks(ranks)} again", ranks, ()),
            ("1 rank, api=single", 1, ("--api=single",)),
            (f"{n_ranks(ranks)}, api=fsdp1", ranks, ("--api=fsdp1",)),
        ):
            again = goes_on(folder / "killed", folder / name.replace(" ", "-"), *arguments, ranks=on, device=device)
            rows.append(ResultRow(name, "goes on from step", KILLED_AT - SAVE_EVERY, again.report["resumed_from"], ""))
            same = 0.0 if on == ranks and not arguments else None
            rows.append(ResultRow(name, "losses differ by", same, furthest(again.losses, whole.losses), "relative"))
        anew = restarted(folder / "restarted", ranks=ranks, where=where, device=device)
        rows.append(ResultRow("torchrun's restart", "losses differ by", 0.0, furthest(anew, whole.losses), "relative"))
    seen = "; ".join(f"{one.name} ({one.files} files): {'counts' if one.counts else one.why}" for one in left)
    notes = (
        f"On the disk after the kill: {seen}.",
        f"A checkpoint counts when all files of its {MANIFEST} are there with their sizes and SHA-256.",
        "A save was timed on CPU cores.",
    )
    return LabResult("resume", "measured", tuple(rows), this_machine(device, ranks), notes=notes)


def main(ranks: int | None = None, where: Where = "before-rename", device: Literal["cpu", "cuda"] = "cpu") -> int:
    """The command; returns its exit status.

    Args:
        ranks: of the run that is killed, by default 2, or one on each GPU; they divide 8 rows.
        where: the moment of the save.
    """
    return command("resume", lambda: run(ranks, where, device))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m labs.experiments.resume", description=__doc__))
