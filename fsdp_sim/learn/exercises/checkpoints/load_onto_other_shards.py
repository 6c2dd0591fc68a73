"""Save from four shards, load onto two: a checkpoint that does not depend on the ranks that wrote it."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.folders import new_folder
from fsdp_sim.learn.judges import InFiles, Inputs, OnRanks

RANKS, COLUMNS = 4, 32


def load_onto_other_shards(rows, folder):
    old = init_device_mesh("cpu", (4,))
    saved = DTensor.from_local(rows, old, [Shard(0)])
    dcp.save({"weight": saved}, checkpoint_id=folder)
    new = init_device_mesh("cpu", (2, 2))
    empty = distribute_tensor(torch.zeros(saved.shape), new, [Replicate(), Shard(0)])
    dcp.load({"weight": empty}, checkpoint_id=folder)  # fills it in place
    return empty.to_local()


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    folder, count = new_folder(), int(torch.randint(20, 60, (1,), generator=draw))
    return [(torch.randn(count, COLUMNS, generator=draw), folder) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    whole = torch.cat([rows for rows, _ in inputs])
    return [whole.chunk(2)[rank % 2] for rank in range(RANKS)]


def halves_the_other_way(inputs: Inputs) -> list[torch.Tensor]:
    whole = torch.cat([rows for rows, _ in inputs])
    return [whole.chunk(2)[rank // 2] for rank in range(RANKS)]


def as_plain_tensors(rows, folder):
    dcp.save({"weight": rows}, checkpoint_id=folder)  # the same name on every rank: saved once
    state = {"weight": torch.zeros_like(rows)}
    dcp.load(state, checkpoint_id=folder)
    return state["weight"].repeat(2, 1)


def a_file_for_each_rank(rows, folder):
    torch.save(rows, f"{folder}/rank-{dist.get_rank()}.pt")
    dist.barrier()
    return torch.load(f"{folder}/rank-{dist.get_rank()}.pt")


EXERCISE = Exercise(
    title="Save from four shards and load onto two",
    kind=ExerciseKind.CODE,
    difficulty=3,
    importance=5,
    minutes=15,
    contract="A weight is sharded over 4 ranks (Shard(0)); each is given its rows, and a folder that all see. Save it "
    "with torch.distributed.checkpoint, then load it for HSDP on a 2 x 2 mesh of (replicate, shard): ranks 0 and 2 "
    "hold the first half of the rows, ranks 1 and 3 the second. Return this rank's rows after loading.",
    reference=load_onto_other_shards,
    why="The checkpoint says of each tensor its whole shape and which rows are in which file. Loading is told what "
    "each rank wants, a DTensor on the new mesh, and reads just these rows from whichever files have them: no rank "
    "ever holds the whole. It fills the tensors it is given, in place. Files that each rank writes and reads alone "
    "know nothing of the whole.",
    hints=(
        "Two descriptions of one tensor: how it lay when it was saved, how it shall lie now. What describes that?",
        "Save a DTensor on a mesh of 4; load into a DTensor of the same whole shape on a mesh of 2 x 2.",
        "DTensor.from_local for the first; distribute_tensor of zeros with [Replicate(), Shard(0)] for the second; "
        "return the second's to_local().",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(InFiles(lambda inputs: [[rows] for rows, _ in inputs], "the rows"),),
        causes=(
            (
                lambda inputs: [rows for rows, _ in inputs],
                "it is the quarter that this rank had before: the new mesh has two shards",
            ),
            (halves_the_other_way, "the halves lie the wrong way: dimensions of the mesh are (replicate, shard)"),
            (
                lambda inputs: [torch.zeros_like(half) for half in in_one_process(inputs)],
                "all of it is zero: dcp.load fills the tensors of the dict it is given, in place",
            ),
            (
                lambda inputs: [inputs[0][0].repeat(2, 1)] * RANKS,
                "only rank 0's rows were saved: a plain tensor under one name counts as the same on all ranks",
            ),
            (
                lambda inputs: [torch.cat([rows for rows, _ in inputs])] * RANKS,
                "it is the whole weight; this rank holds half of its rows",
            ),
        ),
    ),
    wrong=(
        mutant(
            {"(2, 2)": "(4,)", "[Replicate(), Shard(0)]": "[Shard(0)]"},
            "it is the quarter that this rank had before",
            name="shards of four",
        ),
        mutant(
            {"[Replicate(), Shard(0)]": "[Shard(0), Replicate()]"},
            "the halves lie the wrong way",
            name="mesh the wrong way",
        ),
        mutant(
            {'{"weight": empty}': '{"weight": empty.clone()}'},
            "fills the tensors of the dict it is given, in place",
            name="result not in place",
        ),
        mutant({"return empty.to_local()": "return empty.full_tensor()"}, "it is the whole weight", name="the whole"),
        mutant({'{"weight": saved}': '{"weight": rows}'}, "ValueError: Size mismatch between saved", name="saves rows"),
        Wrong(as_plain_tensors, "only rank 0's rows were saved"),
        Wrong(a_file_for_each_rank, "it is the quarter that this rank had before"),
    ),
    shortcuts=(
        Wrong(lambda rows, folder: torch.cat([rows, rows]), "numbers differ"),
        Wrong(lambda rows, folder: torch.zeros(2 * len(rows), COLUMNS), "all of it is zero"),
    ),
    covers=("pitfall 40", "pitfall 48", "coverage 001.55", "coverage 004.47"),
)
