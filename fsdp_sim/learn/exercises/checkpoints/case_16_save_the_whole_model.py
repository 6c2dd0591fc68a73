"""A save that hangs: the whole model is gathered on one rank alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, COLUMNS = 4, 128
State = dict[str, torch.Tensor]


def stub(rows):
    model, mesh = nn.Linear(rows.shape[1], 4 * rows.shape[0], bias=False), init_device_mesh("cpu", (4,))
    fully_shard(model, mesh=mesh)
    model.load_state_dict({"weight": DTensor.from_local(rows, mesh, [Shard(0)])})  # as after training
    if dist.get_rank() == 0:  # only rank 0 writes
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)
    return {}


def case_16(rows):
    model, mesh = nn.Linear(rows.shape[1], 4 * rows.shape[0], bias=False), init_device_mesh("cpu", (4,))
    fully_shard(model, mesh=mesh)
    model.load_state_dict({"weight": DTensor.from_local(rows, mesh, [Shard(0)])})  # as after training
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)  # every rank calls: it is an all-gather
    return state if dist.get_rank() == 0 else {}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    count = int(torch.randint(60, 90, (1,), generator=draw))
    return [(torch.randn(count, COLUMNS, generator=draw),) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[State]:
    return [{"weight": torch.cat([rows for (rows,) in inputs])}, *({} for _ in inputs[1:])]


def own_rows(inputs: Inputs) -> list[State]:
    return [{"weight": inputs[0][0]}, *({} for _ in inputs[1:])]


def everywhere(inputs: Inputs) -> list[State]:
    return in_one_process(inputs)[:1] * len(inputs)


EXERCISE = Exercise(
    title="Hand the whole model to rank 0",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="Each rank is given the rows of a weight that it holds after training. This code shall return the whole "
    "model's state dict on rank 0, which will write it to a file, and an empty dict on all others. It hangs. Mend it; "
    "no rank but rank 0 may be left with a whole model.",
    reference=case_16,
    stub=stub,
    why="A full state dict is put together by all-gathers, one for each parameter, and a collective needs every rank. "
    "So all ranks call, and rank 0 alone writes. cpu_offload=True makes torch hand the result to rank 0 only. The same "
    "holds for full_tensor, and for FSDP1's state_dict with a full type.",
    cause="only the rank that writes asks for the full state dict",
    hints=(
        "Rank 0 holds a quarter of the rows. Where are the others, and what must their owners do?",
        "What looks like reading is a collective: it may not stand in a branch that only one rank takes.",
        "Move get_model_state_dict out of the `if`, so that all ranks call it; decide afterwards what to return.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                own_rows,
                "model.state_dict() of FSDP2 communicates nothing: rank 0 has its own rows, a part of the model",
            ),
            (everywhere, "every rank holds the whole model: cpu_offload=True gives it to rank 0 alone"),
            (
                lambda inputs: [{"weight": rows} for (rows,) in inputs],
                "each rank has its own rows: that is the sharded state dict, for torch.distributed.checkpoint",
            ),
        ),
    ),
    wrong=(
        mutant(
            {"get_model_state_dict(model, options=options)": "model.state_dict()"},
            "model.state_dict() of FSDP2 communicates nothing",
            name="this ranks part",
        ),
        mutant(
            {
                "full_state_dict=True, cpu_offload=True": "full_state_dict=True",
                "state if dist.get_rank() == 0 else {}": "state",
            },
            "every rank holds the whole model",
            name="whole on every rank",
        ),
        mutant(
            {
                "get_model_state_dict(model, options=options)": "get_model_state_dict(model)",
                "state if dist.get_rank() == 0 else {}": "state",
            },
            "that is the sharded state dict",
            name="every rank its part",
        ),
    ),
    shortcuts=(
        Wrong(
            lambda rows: {"weight": torch.zeros(RANKS * len(rows), COLUMNS)} if dist.get_rank() == 0 else {},
            "expected",
        ),
        Wrong(lambda rows: {"weight": rows.repeat(RANKS, 1)} if dist.get_rank() == 0 else {}, "numbers differ"),
    ),
    covers=("pitfall 1", "pitfall 39", "misconception 9", "coverage 004.58", "coverage 004.69"),
    stub_says="returned without calling",
)
