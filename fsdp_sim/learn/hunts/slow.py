"""A training whose numbers are right, and which waits more, or sends more, than it needs to."""

# mypy: disable-error-code="operator, attr-defined"

from __future__ import annotations

from fsdp_sim.learn.hunts.training import Fault, Leaves, Training
from fsdp_sim.ranks import Network


def hides_its_gathers(seed):
    """Four blocks, each a unit. In forward each block's all-gather runs while the block before it computes. Weights
    stay whole from forward to backward; of two micro-batches the last reduces the gradients; the loss is reduced for
    the log once a step."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(4)
            )

        def forward(self, x):
            for number, block in enumerate(self.blocks):
                if number + 1 < len(self.blocks):
                    self.blocks[number + 1].unshard(async_op=True)
                x = x + block(x)
            return x

    micro_batches = 2
    torch.manual_seed(seed)
    model = Stack()
    for unit in (*model.blocks, model):
        fully_shard(unit, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.Generator().manual_seed(seed + 1 + dist.get_rank())
    losses = []
    for _ in range(2):
        total = torch.zeros(())
        for number in range(micro_batches):
            model.set_requires_gradient_sync(number == micro_batches - 1)
            x = torch.randn(1024, 128, generator=rows)
            loss = model(x).square().mean() / micro_batches
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item() / dist.get_world_size())
    return {"losses": losses}


SLOW = Training(
    "It learns what it should, and a step takes too long",
    hides_its_gathers,
    (
        Fault(
            "a block is asked for when the block before it has computed",
            {
                "if number + 1 < len(self.blocks):\n    self.blocks[number + 1].unshard(async_op=True)\n"
                "x = x + block(x)": "x = x + block(x)\nif number + 1 < len(self.blocks):\n"
                "    self.blocks[number + 1].unshard(async_op=True)"
            },
        ),
        Fault("the next block is asked for, and waited for at once", {"unshard(async_op=True)": "unshard()"}),
        Fault(
            "every layer is a unit of its own",
            {
                "for unit in (*model.blocks, model):": (
                    "layers = [layer for block in model.blocks for layer in block[::2]]\n"
                    "for unit in (*layers, *model.blocks, model):"
                )
            },
        ),
        Fault(
            "gradients are reduced with every micro-batch",
            {"model.set_requires_gradient_sync(number == micro_batches - 1)": ""},
        ),
        Fault(
            "the loss is reduced with every micro-batch",
            {
                "total += loss.detach()": "mean = loss.detach().clone()\ndist.all_reduce(mean)\ntotal += mean",
                "dist.all_reduce(total)": "",
            },
        ),
        Fault(
            "weights are freed after forward, and gathered again for backward",
            {"fully_shard(unit, reshard_after_forward=False)": "fully_shard(unit, reshard_after_forward=True)"},
        ),
    ),
    leaves=Leaves.TIMELINE,
    network=Network(bandwidth_gbps=0.3, latency_us=200),
)
