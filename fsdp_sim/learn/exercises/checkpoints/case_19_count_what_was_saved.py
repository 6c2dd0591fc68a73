"""Saving in the background: which checkpoints are really there?"""

from __future__ import annotations

import contextlib
from concurrent.futures import wait
from pathlib import Path
from typing import Any

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

RANKS, SAVES, ROWS, COLUMNS = 2, 4, 40, 16


def stub(gradients, full, folder):
    group = dist.new_group(backend="gloo")  # the saving thread's own: no group is used by two threads
    weight = DTensor.from_local(torch.zeros_like(gradients[0]), init_device_mesh("cpu", (2,)), [Shard(0)])
    saved, under_way = [], list[Any]()
    for step, gradient in enumerate(gradients):
        weight.to_local().sub_(gradient)  # the save before this one goes on meanwhile
        wait(under_way)  # one at a time
        writer = Disk(Path(folder, f"step-{step}"), full[step])
        under_way = [dcp.async_save({"weight": weight}, storage_writer=writer, process_group=group)]
        saved.append(step)
    wait(under_way)
    return saved


def case_19(gradients, full, folder):
    group = dist.new_group(backend="gloo")  # the saving thread's own: no group is used by two threads
    weight = DTensor.from_local(torch.zeros_like(gradients[0]), init_device_mesh("cpu", (2,)), [Shard(0)])
    saved, under_way = [], list[Any]()

    def finish():
        for step, future in under_way:
            with contextlib.suppress(CheckpointException):  # raised on all ranks, or on none
                future.result()
                saved.append(step)

    for step, gradient in enumerate(gradients):
        weight.to_local().sub_(gradient)  # the save before this one goes on meanwhile
        finish()
        writer = Disk(Path(folder, f"step-{step}"), full[step])
        under_way[:] = [(step, dcp.async_save({"weight": weight}, storage_writer=writer, process_group=group))]
    finish()
    return saved


def inputs(seed: int) -> Inputs:
    """At one save one rank has no room: not at the first, and two are to come."""
    draw = torch.Generator().manual_seed(seed)
    unlucky, step = (int(torch.randint(low, high, (1,), generator=draw)) for low, high in ((0, RANKS), (1, SAVES - 2)))
    folder = new_folder()
    return [
        (
            list(torch.randn(SAVES, ROWS, COLUMNS, generator=draw).unbind()),
            [rank == unlucky and i == step for i in range(SAVES)],
            folder,
        )
        for rank in range(RANKS)
    ]


def written_whole(inputs: Inputs) -> list[list[int]]:
    return [[step for step in range(SAVES) if not any(full[step] for _, full, _ in inputs)]] * RANKS


def weights_of_whole_saves(inputs: Inputs) -> list[list[torch.Tensor]]:
    """By rank, what is in each whole checkpoint."""
    weights = []
    for gradients, *_ in inputs:
        weight = torch.zeros_like(gradients[0])
        weights.append([weight.sub_(gradient).clone() for gradient in gradients])
    return [[of_rank[step] for step in written_whole(inputs)[0]] for of_rank in weights]


def run(gradients, full, folder, saves):
    """The training, with a way to look after the futures."""
    group = dist.new_group(backend="gloo")
    weight = DTensor.from_local(torch.zeros_like(gradients[0]), init_device_mesh("cpu", (2,)), [Shard(0)])

    def save(step):
        weight.to_local().sub_(gradients[step])
        writer = Disk(Path(folder, f"step-{step}"), full[step])
        return dcp.async_save({"weight": weight}, storage_writer=writer, process_group=group)

    return saves(save)


def stops_at_the_first_error(gradients, full, folder):
    def saves(save):
        saved = []
        for step in range(len(gradients)):
            try:
                save(step).result()
            except CheckpointException:
                break
            saved.append(step)
        return saved

    return run(gradients, full, folder, saves)


def trusts_the_call(gradients, full, folder):
    def saves(save):
        saved = []
        for step in range(len(gradients)):
            try:
                future = save(step)
                saved.append(step)
            except CheckpointException:
                continue
            future.exception()  # waits, and looks at nothing
        return saved

    return run(gradients, full, folder, saves)


EXERCISE = Exercise(
    title="Count what was saved in the background",
    kind=ExerciseKind.FAULT,
    difficulty=4,
    importance=4,
    minutes=25,
    contract="Each step changes the weights and saves them with dcp.async_save while training goes on; at one step one "
    "rank's disk is full (Disk fails then). Return the steps whose checkpoint is whole, the same list on all ranks. "
    "This code lists a step that no restart can load. Mend it, and keep to one save under way at a time.",
    reference=case_19,
    stub=stub,
    why="async_save copies the tensors and returns: nothing is written so far, and nothing can have failed. The error "
    "is in the future, and nowhere else. So before the next save wait for the one before, and only then count it: that "
    "is also when `latest` may move. The writing thread runs collectives, so it needs a group that training does not "
    "use. To wait at once after async_save is right too, and saves nothing: it is a synchronous save.",
    cause="a save is counted when it has been started, not when it has ended",
    hints=(
        "When async_save returns, what has been done, and what has not? Where does a failure show?",
        "It returns a future. Its result() waits for the save and raises what the save raised, on every rank.",
        "Keep the future of the save under way; before the next async_save, and once at the end, try result() and "
        "append its step, or pass where it raises.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=written_whole,
        checks=(InFiles(weights_of_whole_saves, "the weights of each whole checkpoint"),),
        causes=(
            (
                lambda inputs: [list(range(SAVES))] * RANKS,
                "you counted when async_save returned: it has copied the tensors then, and written nothing; the error "
                "is in the future",
            ),
            (
                lambda inputs: [right[:-1] for right in written_whole(inputs)],
                "the last save was not waited for: after the loop one is still under way",
            ),
            (
                lambda inputs: [
                    right[: next(i for i, s in enumerate(right) if i != s)] for right in written_whole(inputs)
                ],
                "it stopped at the first failure: one lost checkpoint is no reason to end a training",
            ),
            (
                lambda inputs: [[i for i in range(SAVES) if not full[i]] for _, full, _ in inputs],
                "the ranks disagree: a checkpoint that one rank could not write is whole on none",
            ),
        ),
    ),
    wrong=(
        Wrong(trusts_the_call, "you counted when async_save returned"),
        mutant({"return saved": "return saved[:-1]"}, "the last save was not waited for", name="forgets the last"),
        Wrong(stops_at_the_first_error, "it stopped at the first failure"),
        mutant(
            {"return saved": "return [step for step, no_room in enumerate(full) if not no_room]"},
            "the ranks disagree",
            name="only its own",
        ),
    ),
    shortcuts=(
        Wrong(lambda gradients, full, folder: list(range(SAVES)), "you counted when async_save returned"),
        Wrong(lambda gradients, full, folder: [], "values are asked for"),
    ),
    covers=("misconception 32", "pitfall 10"),
    stub_says="you counted when async_save returned",
)
