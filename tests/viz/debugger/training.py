"""What the ranks of the debugger's tests train."""

import torch

from fsdp_sim.mini import fully_shard


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
        self.head = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def train() -> None:
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = model(torch.ones(4, 8)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
