"""A training that runs to its last step and hangs when it saves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import Tensors, batches, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, STEPS, LR = 2, 2, 2.0


stub = Edit(
    {
        (
            "whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # "
            "everyone\n"
            "return whole if dist.get_rank() == 0 else {}"
        ): (
            "if dist.get_rank() == 0:  # one file is enough\n"
            "    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}\n"
            "return {}"
        )
    }
)


def case_22(model, rows, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # everyone
    return whole if dist.get_rank() == 0 else {}


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model = net(draw)
    return [(model, batches(draw, STEPS), LR) for _ in range(RANKS)]


def in_one_process(inputs: Inputs) -> list[Tensors]:
    weights, _, _ = trained(inputs[0][0], list(zip(*(rows for _, rows, _ in inputs), strict=True)), LR)
    return [weights] + [{}] * (RANKS - 1)


def shards_of_rank_0(inputs: Inputs) -> list[Tensors]:
    whole, *others = in_one_process(inputs)
    return [{name: weight.chunk(RANKS)[0] for name, weight in whole.items()}, *others]


EXERCISE = Exercise(
    title="Mend a save that hangs",
    kind=ExerciseKind.FAULT,
    difficulty=1,
    importance=5,
    minutes=10,
    contract="A training of two blocks and a root runs through all its steps. Then it hangs, on any number of ranks "
    "but one. Mend it: rank 0 returns the whole weights by name, every other rank an empty dict. Each rank is given "
    "the same model and its own rows, one tensor for each step.",
    reference=case_22,
    stub=stub,
    why="full_tensor() is an all-gather: rank 0 has its own rows of each weight and needs everybody's. So all ranks "
    "call it and one keeps the result. The same holds for get_model_state_dict(full_state_dict=True) and for FSDP1's "
    "full state dict. FSDP2's own state_dict() communicates nothing, so saved on rank 0 alone it does not hang: it "
    "writes a file with rank 0's shards, which is worse.",
    cause="only rank 0 makes the shards whole, and that is a collective",
    hints=(
        "What does rank 0 do at the end that the others do not? Does it need something that they have?",
        "Whatever makes whole what is sharded is a collective, whoever wants the result.",
        "Call full_tensor() on every rank, before the question who returns it.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (shards_of_rank_0, "these are rank 0's shards: half of each weight, and half a model is in the file"),
            (
                lambda inputs: in_one_process(inputs)[:1] * RANKS,
                "every rank keeps the whole model: as many copies in memory as there are ranks, for one file",
            ),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {
                (
                    "whole = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}  # "
                    "everyone\n"
                    "return whole if dist.get_rank() == 0 else {}"
                ): (
                    "dist.barrier()\n"
                    "if dist.get_rank() == 0:\n"
                    "    return {name: parameter.full_tensor() for name, parameter in model.named_parameters()}\n"
                    "return {}"
                )
            },
            "called one collective too few",
            name="waits first",
        ),
        mutant({"full_tensor()": "to_local()"}, "these are rank 0's shards", name="local parts"),
        mutant(
            {"whole if dist.get_rank() == 0 else {}": "whole"}, "every rank keeps the whole model", name="on every rank"
        ),
    ),
    shortcuts=(
        mutant(
            {"for unit in (*model.layers, model):\nfully_shard(unit)": "", ".full_tensor()": ""},
            "expected",
            name="not sharded",
        ),
        Wrong(lambda model, rows, lr: dict(model.named_parameters()) if dist.get_rank() == 0 else {}, "expected"),
    ),
    covers=("pitfall 1", "misconception 35"),
    stub_says="returned without calling",
)
