"""A layer of experts that hangs with some batches and not with others."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist  # noqa: F401 - in edits
from torch import nn
from torch.distributed.fsdp import fully_shard

from fsdp_sim.learn.edit import Edit
from fsdp_sim.learn.exercise import Exercise, ExerciseKind, Wrong, mutant
from fsdp_sim.learn.exercises.bug_hunt import ROWS, WIDTH
from fsdp_sim.learn.judges import Inputs, OnRanks

RANKS, EXPERTS, LR = 2, 3, 0.1


class Experts(nn.Module):
    """A layer of experts; ``mix`` says how rows go to them and come back."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))

    def forward(self, mix: Callable[..., torch.Tensor], x: torch.Tensor, route: torch.Tensor) -> torch.Tensor:
        return mix(self.experts, x, route)


stub = Edit(
    {
        "out[mine] = expert(x[mine])  # without rows too: all ranks gather it, or none": (
            "if mine.any():  # nothing to compute, nothing to do\n    out[mine] = expert(x[mine])"
        )
    }
)


def case_25(layer, x, route, lr):
    def mix(experts, x, route):
        out = torch.zeros_like(x)
        for number, expert in enumerate(experts):
            mine = route == number
            out[mine] = expert(x[mine])  # without rows too: all ranks gather it, or none
        return out

    for unit in (*layer.experts, layer):
        fully_shard(unit)
    layer(mix, x, route).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr).step()
    return [expert.weight.full_tensor() for expert in layer.experts]


def inputs(seed: int) -> Inputs:
    """Every expert has rows on some rank, and each rank has one expert without."""
    draw = torch.Generator().manual_seed(seed)
    layer = Experts()
    for expert in layer.experts:
        expert.weight.data = torch.randn(WIDTH, WIDTH, generator=draw) / WIDTH**0.5
    first = int(torch.randint(EXPERTS, (1,), generator=draw))
    calls = []
    for rank in range(RANKS):
        lacks = (first + rank) % EXPERTS
        choices = torch.tensor([number for number in range(EXPERTS) if number != lacks])
        picks = torch.cat([torch.tensor([0, 1]), torch.randint(2, (ROWS - 2,), generator=draw)])
        calls.append((layer, torch.randn(ROWS, WIDTH, generator=draw), choices[picks], LR))
    return calls


def stepped(
    inputs: Inputs,
    sees: Callable[..., torch.Tensor] = lambda x, route, n: x[route == n],
    counts: Callable[[int], bool] = lambda n: True,
) -> list[list[torch.Tensor]]:
    """The experts after the step, in closed form: of the sum of squares of x W^T the gradient is 2 W x^T x.

    Args:
        sees: the rows that an expert sees on a rank.
        counts: whether its gradient does.
    """
    after = []
    for n, expert in enumerate(inputs[0][0].experts):
        rows = [sees(x, route, n) for _, x, route, _ in inputs]
        squares = torch.stack([mine.T @ mine for mine in rows]).mean(0)
        after.append(expert.weight.data - counts(n) * LR * 2 * expert.weight.data @ squares)
    return [after] * RANKS


def only_where_all_have_rows(inputs: Inputs) -> list[list[torch.Tensor]]:
    return stepped(inputs, counts=lambda n: all((route == n).any() for _, _, route, _ in inputs))


def with_the_first_row(inputs: Inputs) -> list[list[torch.Tensor]]:
    return stepped(inputs, lambda x, route, n: x[route == n] if (route == n).any() else x[:1])


def not_sharded(layer, x, route, lr):
    outputs = torch.stack([expert(x) for expert in layer.experts])
    outputs[route, torch.arange(len(x))].square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr).step()
    return [expert.weight for expert in layer.experts]


EXERCISE = Exercise(
    title="Mend experts that hang with some batches",
    kind=ExerciseKind.FAULT,
    difficulty=3,
    importance=4,
    minutes=20,
    contract="A layer has three experts, each a unit; `route` names the expert of each row of x. With most batches "
    "the step runs, with some it hangs, and the smaller the batch the more often. Each rank is given the same layer "
    "and its own x and route. Mend it: all ranks do the step, and return the whole weight of each expert after it.",
    reference=case_25,
    stub=stub,
    why="An expert without rows on this rank has rows on another, which waits for this rank's shard in the "
    "all-gather. So control flow must not depend on a rank's own data: run the expert with no rows. A matrix product "
    "of zero rows costs nothing, the hooks fire in forward and in backward, and the gradient of nothing is zero. "
    "Layer-drop and a `continue` on a bad loss hang in the same way; there let all ranks decide alike.",
    cause="a module runs only on the ranks that have rows for it",
    hints=(
        "Which collectives does a rank issue for one expert? Who decides whether it does?",
        "What differs from rank to rank must not decide whether a unit runs. Can a unit run without any rows?",
        "Take the condition away: x[mine] may have shape (0, width), in forward and in backward.",
    ),
    judge=OnRanks(
        inputs=inputs,
        truth=stepped,
        causes=(
            (
                only_where_all_have_rows,
                "an expert that one rank has no rows for got no gradient from the others' rows either",
            ),
            (with_the_first_row, "the row that was sent so that the expert has something counts in its gradient"),
        ),
        abs_=1e-4,
    ),
    wrong=(
        mutant(
            {
                "out[mine] = expert(x[mine])  # without rows too: all ranks gather it, or none": (
                    "with torch.set_grad_enabled(bool(mine.any())):\n"
                    "    rows = expert(x[mine])\n"
                    "if mine.any():\n"
                    "    out[mine] = rows"
                )
            },
            "in the same order on every rank",
            name="without gradient",
        ),
        mutant(
            {
                "torch.zeros_like(x)": "torch.zeros_like(x).requires_grad_() * 1",
                "out[mine] = expert(x[mine])  # without rows too: all ranks gather it, or none": (
                    "everywhere = mine.any().float()\n"
                    "dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)\n"
                    "if everywhere:\n"
                    "    out[mine] = expert(x[mine])"
                ),
            },
            "got no gradient from the others' rows either",
            name="skipped by all",
        ),
        mutant(
            {
                "torch.zeros_like(x)": "[]",
                "out[mine] = expert(x[mine])  # without rows too: all ranks gather it, or none": (
                    "out.append(expert(x[mine] if mine.any() else x[:1]))"
                ),
                "return out": "return torch.cat(out)",
            },
            "counts in its gradient",
            name="a row of someone else",
        ),
    ),
    shortcuts=(
        Wrong(not_sharded, "expected"),
        Wrong(lambda layer, x, route, lr: [expert.weight for expert in layer.experts], "expected"),
    ),
    covers=("pitfall 4",),
    stub_says="called the same collective for another unit",
)
