"""A GPT with FSDP2: torchrun --standalone --nproc_per_node=2 labs/experiments/scripts/train_fsdp2.py"""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from labs.data import load_corpus, local_batch
from labs.model import build
from labs.model.gpt import GPTConfig


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    mesh = init_device_mesh(device.type, (ranks,))
    model: Any = build(GPTConfig.preset("teaching"), seed=0).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    corpus = load_corpus()
    for step, (x, y) in enumerate([corpus.batch(step, 8, 64) for step in range(6)]):
        optimizer.zero_grad()
        loss = model(local_batch(x, rank, ranks).to(device), local_batch(y, rank, ranks).to(device))
        loss.backward()
        norm: Any = clip_grad_norm_(model.parameters(), max_norm=1.0)
        norm = norm.full_tensor()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}  loss {mean.item():.6f}  norm {norm.item():.6f}", flush=True)

    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and len(sys.argv) > 1:
        torch.save(weights, sys.argv[1])


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # once the model is gone
