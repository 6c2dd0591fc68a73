"""DDP with gradient accumulation by ``no_sync`` in a conditional context, a scheduler, and the norm printed."""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=32, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)  # each rank another model: DDP sends rank 0's
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
    ddp_model = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=False)
    accumulation = 3

    for step in range(9):
        x, y = torch.randn(4, 32), torch.randint(8, (4,))
        last = (step + 1) % accumulation == 0
        ctx = contextlib.nullcontext() if last else ddp_model.no_sync()
        with ctx:
            loss = nn.functional.cross_entropy(ddp_model(x), y) / accumulation
            loss.backward()
        if last:
            norm = nn.utils.clip_grad_norm_(ddp_model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"norm {norm.item():.6f}")
        if rank == 0:
            print(f"loss {loss.item():.17g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "RANK" in os.environ, "run it with torchrun"
    main()
