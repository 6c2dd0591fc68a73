"""DDP that saves on rank 0, and goes on from what it saved."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP

PATH = os.path.join(os.environ.get("OUT_DIR", "."), "resume.pt")


def train(net, opt, steps, rank):
    for step in range(steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 8, 16, generator=generator)
        loss = F.mse_loss(net(x), x.flip(-1))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0:
            print(f"loss {loss.item():.17g}")


def make():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(16, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = DDP(make())
    opt = optim.AdamW(net.parameters(), lr=1e-2)
    train(net, opt, 3, rank)
    # only one rank writes
    if rank == 0:
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict()}, PATH)
        print("saved")
    dist.barrier()

    again = DDP(make())
    opt2 = optim.AdamW(again.parameters(), lr=1e-2)
    saved = torch.load(PATH, map_location="cpu")
    again.module.load_state_dict(saved["net"])
    opt2.load_state_dict(saved["opt"])
    train(again, opt2, 3, rank)
    dist.destroy_process_group()


main()
