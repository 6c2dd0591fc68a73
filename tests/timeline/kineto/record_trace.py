"""Record a trace of torch's own FSDP on gloo ranks: tests run it, and the traces in ``recorded/`` were made with it.

    torchrun --standalone --nproc_per_node=2 tests/timeline/kineto/record_trace.py FOLDER fsdp2 record_shapes schedule

Words after the folder: one of fsdp2, fsdp1, ddp; of bf16, prefetch, accumulate, checkpointing; schedule (steps 2 and 3
of four are recorded, else two steps); and the profiler's own with_stack, with_modules, profile_memory, record_shapes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.profiler import ProfilerActivity, profile, schedule

WIDTH, LAYERS, VOCAB = 64, 3, 256
PROFILER = ("with_stack", "with_modules", "profile_memory", "record_shapes")


class Block(nn.Module):
    """A residual block: 2 x 64 norm, 64 x 256 and 256 x 64 matrices with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        wrap = checkpoint_wrapper if checkpointing else (lambda block: block)
        self.layers = nn.ModuleList(wrap(Block()) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return self.head(h)


def sharded(words: set[str]) -> nn.Module:
    model = Model("checkpointing" in words)
    if "ddp" in words:
        return nn.parallel.DistributedDataParallel(model)
    if "fsdp1" in words:
        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=cpu)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "bf16" in words else MixedPrecisionPolicy()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if "prefetch" in words:
        for layer, following in zip(model.layers, model.layers[1:], strict=False):
            layer.set_modules_to_forward_prefetch([following])
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int) -> None:
    optimizer.zero_grad()
    for k in range(micro_batches):
        if micro_batches > 1:
            model.set_requires_gradient_sync(k == micro_batches - 1)
        x = torch.randint(0, VOCAB, (8, 32))
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
    optimizer.step()


def main(folder: str, *words: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = sharded(set(words))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    micro_batches = 2 if "accumulate" in words else 1
    steps = schedule(wait=1, warmup=1, active=2, repeat=1) if "schedule" in words else None
    if steps is None:
        step(model, optimizer, micro_batches)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=steps, **{word: word in words for word in PROFILER}
    ) as recording:
        for _ in range(4 if steps else 2):
            step(model, optimizer, micro_batches)
            if steps:
                recording.step()
    recording.export_chrome_trace(str(Path(folder, f"rank{dist.get_rank()}.json")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
