"""Everything in one unit: sharded, and no memory saved."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.wrapping import AllGatherCount
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks, PeakBytes

RANKS, BLOCKS, WIDTH = 2, 4, 512
MODEL_BYTES = 2 * BLOCKS * WIDTH * WIDTH * 4
FSDP_BYTES = 3 * 2**20  # by which a process grows for torch's FSDP itself: 0.9 to 1.5 MiB, whatever the width


class Model(nn.Module):
    """Blocks of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU(), nn.Linear(WIDTH, WIDTH, bias=False))
            for _ in range(BLOCKS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


stub = Edit({"for block in model.blocks:\nfully_shard(block)": ""})


def case_06(model, x):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    with torch.no_grad():
        return model(x)


def inputs(seed: int) -> Inputs:
    torch.manual_seed(seed)
    model = Model()
    return [(model, torch.randn(2, WIDTH)) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(x) for model, x in inputs]


def each_linear(model, x):
    for module in model.modules():
        if isinstance(module, nn.Linear):
            fully_shard(module)
    return stub(model, x)


def not_sharded(model, x):
    with torch.no_grad():
        return model(x)


EXERCISE = Exercise(
    title="Mend a model that is sharded and saves nothing",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=10,
    contract="The model has four equal blocks (model.blocks) and nothing else. This code shards it over two ranks with "
    "torch's fully_shard, runs one forward, and needs two and a half times the memory of the whole model. Mend it. The "
    "result must stay that of one process, with one all-gather for each block.",
    targets="A pass: at most 1.4 times the model, which every rank is given whole. Good: at most 1.3 times.",
    reference=case_06,
    stub=stub,
    why="What one call of fully_shard manages is gathered together: the root alone is one unit, so the whole model is "
    "there at once, and once more in the buffer it arrives in. With a call for each block first, three blocks are the "
    "most that is there besides the shards. What is left for the root here is nothing, and it is still called last: "
    "the root is what orders its units.",
    cause="the whole model is one unit",
    hints=(
        "What is gathered at once? How many calls of fully_shard are there, and what does each of them manage?",
        "A call takes all parameters that no earlier call inside has taken. So the inner modules come first.",
        "A loop over model.blocks with fully_shard(block), and after it the root as before.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(
            OnlyCollectives(frozenset({"all_gather"}), "a forward needs nothing else"),
            PeakBytes(
                lambda trial: MODEL_BYTES,
                proof="the whole model, which every rank is given",
                good=1.3,
                passes=1.4,
                cure="all of the model is gathered at once: make each block a unit of its own, freed after its "
                "forward, before the root takes the rest",
                unmetered=FSDP_BYTES,
            ),
            AllGatherCount(
                BLOCKS,
                BLOCKS,
                fewer="a forward gathers each unit once, and every block is to be one",
                more="units smaller than a block pay more latencies for the same bytes",
            ),
        ),
        metered=True,
        abs_=1e-4,
    ),
    wrong=(
        Wrong(stub, "all of the model is gathered at once"),
        mutant(
            {"in model.blocks": "in model.blocks[:1]"}, "all of the model is gathered at once", name="only the first"
        ),
        mutant(
            {"fully_shard(block)": "fully_shard(block, reshard_after_forward=False)"},
            "freed after its forward",
            name="kept after forward",
        ),
        Wrong(each_linear, "units smaller than a block pay more latencies"),
    ),
    shortcuts=(
        Wrong(not_sharded, "expected 4 all-gathers, found 0"),
        Wrong(lambda model, x: torch.zeros_like(x), "all of it is zero"),
    ),
    covers=("pitfall 13", "coverage 004.36", "coverage 004.87", "misconception 3.14"),
    stub_says="all of the model is gathered at once",
)
