"""A training whose memory, seen allocation by allocation, says what is kept that should have gone."""

# mypy: disable-error-code="operator, attr-defined"

from __future__ import annotations

from fsdp_sim.learn.hunts.training import Fault, Leaves, Training


def holds_what_it_needs(seed):
    """Four blocks, each a unit that is freed after its forward. A step has two micro-batches, whose gradients are
    reduced at once. After each step every rank
    averages its shards of the weights, and evaluates on one batch."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(96, 192), nn.GELU(), nn.Linear(192, 96)) for _ in range(4)
            )

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x

    torch.manual_seed(seed)
    model = Stack()
    for unit in (*model.blocks, model):
        fully_shard(unit, reshard_after_forward=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = torch.Generator().manual_seed(seed + 1 + dist.get_rank())
    held_out = torch.randn(64, 96, generator=rows)
    average = [torch.zeros_like(parameter.to_local()) for parameter in model.parameters()]
    losses, checks = [], []
    for _ in range(3):
        for _ in range(2):
            x = torch.randn(64, 96, generator=rows)
            loss = model(x).square().mean() / 2
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        for old, parameter in zip(average, model.parameters(), strict=True):
            old.lerp_(parameter.to_local().detach(), 0.1)
        with torch.no_grad():
            check = model(held_out).square().mean()
            checks.append(check)
    return {"losses": torch.stack(losses), "checks": torch.stack(checks)}


MEMORY = Training(
    "It runs out of memory after a while, or at once",
    holds_what_it_needs,
    (
        Fault(
            "the losses that are kept for the log keep their graphs",
            {
                "loss.backward()": "loss.backward(retain_graph=True)",
                "losses.append(loss.detach())": "losses.append(loss)",
            },
        ),
        Fault(
            "the evaluation builds a graph, and its results keep it",
            {
                "with torch.no_grad():\n    check = model(held_out).square().mean()\n    checks.append(check)": (
                    "check = model(held_out).square().mean()\nchecks.append(check)"
                )
            },
        ),
        Fault(
            "gradients stay whole until the last micro-batch",
            {"for _ in range(2):": "for number in range(2):\n    model.set_requires_gradient_sync(number == 1)"},
        ),
        Fault(
            "blocks are not freed after their forward",
            {"fully_shard(unit, reshard_after_forward=True)": "fully_shard(unit, reshard_after_forward=False)"},
        ),
        Fault(
            "every rank averages whole weights in place of its shards",
            {
                "torch.zeros_like(parameter.to_local())": "torch.zeros(parameter.shape)",
                "parameter.to_local().detach()": "parameter.full_tensor().detach()",
            },
        ),
        Fault(
            "the model is one unit, which is whole as long as any of it runs", {"(*model.blocks, model)": "(model,)"}
        ),
    ),
    leaves=Leaves.MEMORY,
)
