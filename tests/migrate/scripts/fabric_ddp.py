"""DDP through Lightning Fabric: the strategy is a word, each rank seeds otherwise."""

import os

import torch
from lightning_fabric import Fabric
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width=16, depth=2):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    # all ranks of this node
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(fabric.global_rank)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(4):
        x, y = torch.randn(4, 16), torch.randint(8, (4,))
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if fabric.global_rank == 0:
            print(f"loss {loss.item():.17g}")


if __name__ == "__main__":
    assert "RANK" in os.environ, "run it with torchrun"
    main()
