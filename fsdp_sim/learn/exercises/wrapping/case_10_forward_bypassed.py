"""A method that is not forward."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.wrapping import AllGatherCount
from fsdp_sim.learn.judges import Inputs, OnlyCollectives, OnRanks

RANKS, WORDS, WIDTH, BLOCKS, STEPS = 2, 128, 64, 3, 6


class Model(nn.Module):
    """Scores of the next word; ``generate`` appends the best one, a few times."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)

    def generate(self, tokens: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            tokens = torch.cat([tokens, self.forward(tokens).argmax(-1, keepdim=True)], dim=1)
        return tokens


stub = Edit({'register_fsdp_forward_method(model, "generate")': ""})


def case_10(model, tokens, steps):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    with torch.no_grad():
        return model.generate(tokens, steps)


def inputs(seed: int) -> Inputs:
    torch.manual_seed(seed)
    model = Model()
    nn.init.normal_(model.head.bias, std=0.3)
    return [(model, torch.randint(WORDS, (4, 5)), STEPS) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.generate(tokens, steps) for model, tokens, steps in inputs]


def never_sharded(model, tokens, steps):
    with torch.no_grad():
        return model.generate(tokens, steps)


EXERCISE = Exercise(
    title="Mend a generate that finds only shards",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=4,
    minutes=15,
    contract="model(tokens) works and model.generate(tokens, steps), which appends the best next word as often as "
    "steps says, ends with a RuntimeError about a mix of torch.Tensor and DTensor. Mend it without changing the "
    "model or how it is sharded: each block is a unit, and the root takes the embedding and the head.",
    reference=case_10,
    stub=stub,
    why="FSDP gathers in hooks, and hooks run when a module is called: model(tokens). A method of another name, and "
    "self.forward called by hand, run past them and find the shards, which are DTensors. register_fsdp_forward_method "
    "puts the same hooks around the method that you name. The loop must take the same number of steps on every rank, "
    "for each of them gathers.",
    cause="a method other than forward runs without FSDP's hooks",
    hints=(
        "Who gathers the parameters of the root, and when is that called?",
        "The hooks are around forward as model(...) calls it. torch has a function to put them around another method.",
        "After fully_shard(model): register_fsdp_forward_method, with the module and the name of the method.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        checks=(
            OnlyCollectives(frozenset({"all_gather"}), "a forward needs nothing else"),
            AllGatherCount(
                STEPS * BLOCKS,
                STEPS * (BLOCKS + 1),
                fewer="every step gathers every block of a sharded model",
                more="each block is a unit, and the root",
            ),
        ),
    ),
    wrong=(
        Wrong(stub, "mixed torch.Tensor and DTensor"),
        mutant(
            {
                "return model.generate(tokens, steps)": (
                    "for _ in range(steps):\n"
                    "    tokens = torch.cat([tokens, model.forward(tokens).argmax(-1, keepdim=True)], dim=1)\n"
                    "return tokens"
                )
            },
            "mixed torch.Tensor and DTensor",
            name="calls forward",
        ),
        mutant(
            {"model.generate(tokens, steps)": "torch.cat([tokens, model(tokens).argmax(-1, keepdim=True)], dim=1)"},
            "its shape should be (4, 11), not (4, 6)",
            name="one word",
        ),
    ),
    shortcuts=(
        Wrong(never_sharded, "every step gathers every block"),
        Wrong(lambda model, tokens, steps: torch.cat([tokens] * 3, dim=1)[:, : 5 + steps], "numbers differ"),
    ),
    covers=("pitfall 18",),
    stub_says="mixed torch.Tensor and DTensor",
)
