"""Faulty code, its symptoms; find the fault.

Most of these train the same small model with torch's `fully_shard`; it and the training in one process stand here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn

WIDTH, BLOCKS, ROWS = 160, 2, 8
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two blocks, and an embedding and a head, which fall to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From rows of WIDTH numbers to as many."""
        x = torch.tanh(self.embed(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def net(draw: torch.Generator) -> Net:
    """A model whose weights are drawn from ``draw``."""
    model = Net()
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) / WIDTH**0.5
    return model


def batches(draw: torch.Generator, steps: int) -> list[torch.Tensor]:
    """One rank's rows of each step."""
    return list(torch.randn(steps, ROWS, WIDTH, generator=draw).unbind())


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of all exercises here: the mean square of the output."""
    return model(x).square().mean()


def trained(
    model: nn.Module,
    steps: Sequence[Sequence[torch.Tensor]],
    lr: float,
    momentum: float = 0.0,
    which: Callable[[str], bool] = lambda name: True,
) -> tuple[Tensors, torch.Tensor, list[nn.Module]]:
    """Train a copy in one process with SGD, on the rows of all ranks at once.

    Args:
        steps: for each step the rows of each rank, equally many.
        which: the parameters, by name, that the optimizer has.

    Returns:
        the weights, the loss of each step, and the model as it was after each step.
    """
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for name, p in model.named_parameters() if which(name)], lr, momentum=momentum)
    losses, after = [], []
    for rows in steps:
        model.zero_grad()
        loss = loss_of(model, torch.cat(list(rows)))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        after.append(copy.deepcopy(model))
    return weights_of(model), torch.stack(losses), after


def weights_of(model: nn.Module) -> Tensors:
    """Its parameters by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}
