"""A checkpoint that is written over, and a disk that is full."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.folders import new_folder
from fsdp_sim.learn.judges import InFiles, Inputs, OnRanks
from fsdp_sim.learn.on_disk import Disk

RANKS, SAVES, ROWS, COLUMNS = 2, 3, 40, 16


def stub(weights, full, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path = Path(folder, "newest")
    for rows, no_room in zip(weights, full, strict=True):
        with contextlib.suppress(CheckpointException):  # training goes on; there is the checkpoint before
            dcp.save({"weight": DTensor.from_local(rows, mesh, [Shard(0)])}, storage_writer=Disk(path, no_room))
    found = {"weight": DTensor.from_local(torch.zeros_like(weights[0]), mesh, [Shard(0)])}
    try:
        dcp.load(found, checkpoint_id=path)
    except CheckpointException:
        return torch.zeros_like(weights[0])  # from the start
    return found["weight"].to_local()


def case_18(weights, full, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path = None
    for step, (rows, no_room) in enumerate(zip(weights, full, strict=True)):
        unfinished, final = Path(folder, f"step-{step}.tmp"), Path(folder, f"step-{step}")
        try:
            dcp.save({"weight": DTensor.from_local(rows, mesh, [Shard(0)])}, storage_writer=Disk(unfinished, no_room))
        except CheckpointException:
            continue  # on all ranks: nobody gives it its name
        if dist.get_rank() == 0:
            unfinished.rename(final)
        dist.barrier()
        path = final
    found = {"weight": DTensor.from_local(torch.zeros_like(weights[0]), mesh, [Shard(0)])}
    dcp.load(found, checkpoint_id=path)
    return found["weight"].to_local()


def inputs(seed: int) -> Inputs:
    """The disk of one rank is full at the last save."""
    draw = torch.Generator().manual_seed(seed)
    unlucky, folder = int(torch.randint(RANKS, (1,), generator=draw)), new_folder()
    return [
        (
            list(torch.randn(SAVES, ROWS, COLUMNS, generator=draw).unbind()),
            [False] * (SAVES - 1) + [rank == unlucky],
            folder,
        )
        for rank in range(RANKS)
    ]


def the_last_that_was_written(inputs: Inputs) -> list[torch.Tensor]:
    whole = [not any(full[i] for _, full, _ in inputs) for i in range(SAVES)]
    last = max(i for i in range(SAVES) if whole[i])
    return [weights[last] for weights, _, _ in inputs]


def from_memory(weights, full, folder):
    return weights[-1]


def each_rank_decides(weights, full, folder):
    """Each rank's own file, named when this rank has written it."""
    for rows, no_room in zip(weights, full, strict=True):
        if not no_room:
            torch.save(rows, Path(folder, f"rank-{dist.get_rank()}"))
    return torch.load(Path(folder, f"rank-{dist.get_rank()}"))


EXERCISE = Exercise(
    title="Keep a checkpoint when the next one fails",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=5,
    minutes=25,
    contract="After each step all ranks save into a folder that they share; full says of each save whether this rank's "
    "disk has no room then (Disk is a writer of torch.distributed.checkpoint that fails so). Return this rank's rows "
    "of the newest checkpoint that a restart can load, zeros if there is none. This code had good checkpoints, and "
    "its restart finds nothing. Mend it.",
    reference=case_18,
    stub=stub,
    why="dcp.save into the same folder writes over what is there: files are opened in place, and a failure in the "
    "middle leaves neither the old checkpoint nor the new one. So let all ranks write to a name that does not count, "
    "then give it its name by one rename, which a file system does whole or not at all. DCP raises on all ranks when "
    "one fails, so all know. Keep two. (CheckpointException is a BaseException; `except Exception` misses it.)",
    cause="the new checkpoint is written over the one before it",
    hints=(
        "What is in the folder after the second save has failed halfway, and what was there before?",
        "Never write into what you may need. A checkpoint may only get its name when all ranks have written.",
        "Save each step to step-N.tmp; if nobody raised, rank 0 renames it to step-N, then a barrier; load the last "
        "one renamed.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=the_last_that_was_written,
        checks=(InFiles(lambda inputs: [[rows] for rows in the_last_that_was_written(inputs)], "the newest rows"),),
        causes=(
            (
                lambda inputs: [torch.zeros_like(weights[0]) for weights, _, _ in inputs],
                "nothing could be loaded: dcp.save opens the files of the good checkpoint and writes over them",
            ),
            (lambda inputs: [weights[0] for weights, _, _ in inputs], "it is the first checkpoint, not the newest"),
            (
                lambda inputs: [weights[-1] for weights, _, _ in inputs],
                "these weights never were on the disk as a whole: one rank had no room",
            ),
            (
                lambda inputs: [weights[-2 if full[-1] else -1] for weights, full, _ in inputs],
                "the ranks have rows of different steps: a checkpoint counts when all ranks have written it",
            ),
        ),
    ),
    wrong=(
        Wrong(stub, "writes over them"),
        mutant(
            {"zip(weights, full, strict=True)": "zip(weights[:1], full[:1], strict=True)"},
            "it is the first checkpoint",
            name="the first",
        ),
        Wrong(from_memory, "never were on the disk as a whole"),
        Wrong(each_rank_decides, "the ranks have rows of different steps"),
    ),
    shortcuts=(
        Wrong(lambda weights, full, folder: torch.zeros_like(weights[0]), "nothing could be loaded"),
        Wrong(lambda weights, full, folder: torch.ones_like(weights[0]), "numbers differ"),
    ),
    covers=("pitfall 44", "misconception 31", "coverage 004.121"),
    stub_says="writes over them",
)
