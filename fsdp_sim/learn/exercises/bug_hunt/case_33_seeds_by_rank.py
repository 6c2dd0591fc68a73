"""A model that nobody can reproduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import Tensors
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, WIDTH = 4, 256


stub = Edit(
    {
        "torch.manual_seed(seed)  # one model": (
            "torch.manual_seed(seed + dist.get_rank())  # each rank its own dropout"
        ),
        "torch.manual_seed(seed + dist.get_rank())  # each rank its own dropout": "",
    }
)


def case_33(seed, width):
    torch.manual_seed(seed)  # one model
    model = nn.Linear(width, width, bias=False)
    fully_shard(model)
    torch.manual_seed(seed + dist.get_rank())  # each rank its own dropout
    return {"weight": model.state_dict()["weight"].full_tensor(), "noise": torch.rand(width)}


def inputs(seed: int) -> Inputs:
    return [(seed, WIDTH)] * RANKS


def model_of(seed: int) -> torch.Tensor:
    """The weight that one process with this seed makes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Linear(WIDTH, WIDTH, bias=False).weight.detach()


def noise_of(seed: int, after_the_model: bool = False) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if after_the_model:
            nn.Linear(WIDTH, WIDTH, bias=False)
        return torch.rand(WIDTH)


def in_one_process(inputs: Inputs) -> list[Tensors]:
    return [{"weight": model_of(seed), "noise": noise_of(seed + rank)} for rank, (seed, _) in enumerate(inputs)]


def mosaic(inputs: Inputs, later: bool = True) -> list[Tensors]:
    parts = [model_of(seed + rank).chunk(RANKS)[rank] for rank, (seed, _) in enumerate(inputs)]
    return [
        {"weight": torch.cat(parts), "noise": noise_of(seed + rank, later)} for rank, (seed, _) in enumerate(inputs)
    ]


def the_same_noise(inputs: Inputs, later: bool = True) -> list[Tensors]:
    return [{"weight": model_of(seed), "noise": noise_of(seed, later)} for seed, _ in inputs]


def the_same_rows(inputs: Inputs) -> list[Tensors]:
    """The rows that the first draw gives, on every rank."""
    found = []
    for rank, (seed, _) in enumerate(inputs):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            bound = WIDTH**-0.5
            rows = torch.empty(WIDTH // RANKS, WIDTH).uniform_(-bound, bound)
        found.append({"weight": rows.repeat(RANKS, 1), "noise": noise_of(seed + rank)})
    return found


EXERCISE = Exercise(
    title="Mend a model that nobody can reproduce",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=15,
    contract="The loss before the first step depends on the number of ranks, and no single process starts from the "
    "same weights. Every rank has a seed of its own, because dropout must not drop the same activations everywhere. "
    "Mend it: the whole weight is that of one process after torch.manual_seed(seed), and the noise of each rank the "
    "first numbers after torch.manual_seed(seed + rank).",
    reference=case_33,
    stub=stub,
    why="fully_shard keeps of each rank's tensor the rows that are this rank's, and broadcasts nothing. With other "
    "weights on each rank the model is a mosaic: rows 0 to 63 of one model, 64 to 127 of another. It trains all the "
    "same. One seed for the model, then another per rank for what must differ: dropout, and the order of data. FSDP1 "
    "has sync_module_states, off by default; with FSDP2 rank 0 can load and broadcast with set_model_state_dict.",
    cause="every rank draws its weights from another seed",
    hints=(
        "Two things are drawn. Which must be the same on all ranks, and which must not?",
        "FSDP2 takes each rank's own rows of whatever the rank has made. When are they rows of one model?",
        "Seed twice: before the model is made, and again before anything else is drawn.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (
                mosaic,
                "the weight is a mosaic: each rank's rows are those of its own model, and FSDP broadcasts nothing",
            ),
            (
                lambda inputs: mosaic(inputs, later=False),
                "the weight is a mosaic: each rank's rows are those of its own model, and FSDP broadcasts nothing",
            ),
            (the_same_noise, "all ranks draw the same noise: dropout would drop the same activations everywhere"),
            (
                lambda inputs: the_same_noise(inputs, later=False),
                "all ranks draw the same noise: dropout would drop the same activations everywhere",
            ),
            (
                the_same_rows,
                "every rank has drawn the same rows: on a mesh of CPUs a DTensor's random numbers know no ranks",
            ),
        ),
    ),
    wrong=(
        mutant(
            {"torch.manual_seed(seed + dist.get_rank())  # each rank its own dropout": ""},
            "all ranks draw the same noise",
            name="one seed",
        ),
        mutant({"seed + dist.get_rank()": "seed"}, "all ranks draw the same noise", name="one seed twice"),
        mutant({"(seed)": "(seed + dist.get_rank())"}, "the weight is a mosaic", name="its own twice"),
        mutant(
            {
                "model = nn.Linear(width, width, bias=False)\nfully_shard(model)": (
                    'with torch.device("meta"):  # as large models are made; on CPUs each rank draws its rows '
                    "from the same state\n"
                    "    model = nn.Linear(width, width, bias=False)\n"
                    "fully_shard(model)\n"
                    'model.to_empty(device="cpu")\n'
                    "model.reset_parameters()"
                )
            },
            "every rank has drawn the same rows",
            name="drawn in shards",
        ),
    ),
    shortcuts=(
        mutant(
            {
                "fully_shard(model)": "",
                "seed + dist.get_rank()": "seed + 1",
                'model.state_dict()["weight"].full_tensor()': "model.weight",
            },
            "noise: expected",
            name="without sharding",
        ),
        Wrong(lambda seed, width: {"weight": torch.zeros(width, width), "noise": torch.zeros(width)}, "expected"),
    ),
    covers=("pitfall 19", "pitfall 37", "misconception 26"),
    stub_says="the weight is a mosaic",
)
