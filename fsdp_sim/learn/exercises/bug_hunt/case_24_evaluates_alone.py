"""A training that hangs after its first evaluation."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import batches, loss_of, net, trained
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, STEPS, LR = 2, 3, 2.0


stub = Edit(
    {
        (
            "with torch.no_grad():\n"
            "loss = model(validation).square().mean()\n"
            "dist.all_reduce(loss)\n"
            "losses.append(loss / dist.get_world_size())"
        ): (
            "if dist.get_rank() == 0:  # one log is enough\n"
            "    with torch.no_grad():\n"
            "        losses.append(model(validation).square().mean())"
        )
    }
)


def case_24(model, rows, validation, lr):
    for unit in (*model.layers, model):
        fully_shard(unit)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    losses = []
    for x in rows:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss = model(validation).square().mean()
        dist.all_reduce(loss)
        losses.append(loss / dist.get_world_size())
    return torch.stack(losses)


def inputs(seed: int) -> Inputs:
    draw = torch.Generator().manual_seed(seed)
    model = net(draw)
    return [(model, batches(draw, STEPS), batches(draw, 1)[0], LR) for _ in range(RANKS)]


def by_rank(inputs: Inputs) -> torch.Tensor:
    """The loss after each step (columns) on each rank's validation rows (rows)."""
    _, _, models = trained(inputs[0][0], list(zip(*(rows for _, rows, _, _ in inputs), strict=True)), LR)
    with torch.no_grad():
        return torch.stack(
            [torch.stack([loss_of(model, validation) for model in models]) for _, _, validation, _ in inputs]
        )


def in_one_process(inputs: Inputs) -> list[torch.Tensor]:
    return [by_rank(inputs).mean(0)] * RANKS


def before_each_step(inputs: Inputs) -> list[torch.Tensor]:
    with torch.no_grad():
        first = torch.stack([loss_of(inputs[0][0], validation) for _, _, validation, _ in inputs]).mean()
    return [torch.cat([first[None], by_rank(inputs).mean(0)[:-1]])] * RANKS


def summed(loss):
    dist.all_reduce(loss)
    return loss


def mean(loss):
    return summed(loss) / dist.get_world_size()


def not_sharded(model, rows, validation, lr):
    with torch.no_grad():
        return torch.stack([mean(model(validation).square().mean()) for _ in rows])


EXERCISE = Exercise(
    title="Mend an evaluation that stops the training",
    kind=ExerciseKind.FAULT,
    difficulty=2,
    importance=5,
    minutes=15,
    contract="After each step the loss on validation rows is wanted, for the log. The first step runs, then all ranks "
    "hang; without the evaluation none does. Each rank is given the same model, its own training rows for each step "
    "and its own validation rows, equally many. Mend it: return, on every rank, after each step the mean loss over "
    "all ranks' validation rows.",
    reference=case_24,
    stub=stub,
    why="Every forward of a sharded model gathers its units, so a forward is a collective like any other: all ranks "
    "run it, or none. Rank 0's forward meets the others' next training step: the first all-gathers even match, by "
    "accident, and only later does someone wait for what never comes. As everyone takes part, let everyone have rows "
    "of its own, and reduce the losses.",
    cause="only one rank runs a forward that gathers",
    hints=(
        "What does a forward of a sharded model do before each block computes? With whom?",
        "Rank 0 alone cannot run a forward. If all ranks must run it anyway, what could they do usefully?",
        "Evaluate on all ranks, all_reduce the loss and divide by the number of ranks.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=in_one_process,
        causes=(
            (lambda inputs: list(by_rank(inputs)), "each rank has the loss of its own validation rows only"),
            (
                lambda inputs: [by_rank(inputs)[0]] * RANKS,
                "it is the loss of rank 0's validation rows; the others' rows were computed for nothing",
            ),
            (before_each_step, "it is the loss before each step; asked for is the one after it"),
        ),
    ),
    wrong=(
        mutant(
            {"dist.all_reduce(loss)": "", "loss / dist.get_world_size()": "loss"}, "each rank has the loss of its own"
        ),
        mutant({"loss / dist.get_world_size()": "loss"}, "2 times too large", name="summed"),
        mutant(
            {"dist.all_reduce(loss)": "dist.broadcast(loss, src=0)", "loss / dist.get_world_size()": "loss"},
            "rank 0's validation rows",
            name="from rank 0",
        ),
        mutant(
            {
                "model(x).square().mean().backward()\noptimizer.step()\noptimizer.zero_grad()": "",
                "return": (
                    "    model(x).square().mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()\nreturn"
                ),
            },
            "it is the loss before each step",
            name="before the step",
        ),
        mutant(
            {
                (
                    "with torch.no_grad():\n"
                    "loss = model(validation).square().mean()\n"
                    "dist.all_reduce(loss)\n"
                    "losses.append(loss / dist.get_world_size())"
                ): "if dist.get_rank() == 0:\n    losses.append(model(validation).square().mean())\ndist.barrier()"
            },
            "called a different collective",
            name="with a barrier",
        ),
    ),
    shortcuts=(
        Wrong(not_sharded, "expected"),
        Wrong(lambda model, rows, validation, lr: torch.zeros(STEPS), "all of it is zero"),
    ),
    covers=("pitfall 3",),
    stub_says="called the same collective for another unit",
)
