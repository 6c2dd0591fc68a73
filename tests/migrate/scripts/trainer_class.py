"""A loop in a class, as Hugging Face's Trainer is read by many: FSDP1 in its constructor, hybrid on a mesh it is given."""

import os

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


class Arguments:
    per_device_train_batch_size = 4
    gradient_accumulation_steps = 2
    learning_rate = 1e-2
    max_grad_norm = 0.3
    max_steps = 4


class Trainer:
    def __init__(self, model, args, data):
        self.args, self.data = args, data
        mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
        self.model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.learning_rate)

    def training_step(self, batch):
        self.model.train()
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x).mean(dim=1), y) / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()

    def train(self):
        for step in range(self.args.max_steps):
            total = 0.0
            for micro in range(self.args.gradient_accumulation_steps):
                accumulating = micro < self.args.gradient_accumulation_steps - 1
                if accumulating:
                    with self.model.no_sync():
                        total += self.training_step(next(self.data))
                else:
                    total += self.training_step(next(self.data))
            self.model.clip_grad_norm_(self.args.max_grad_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            dist.all_reduce(total)
            if dist.get_rank() == 0:
                print(f"loss {total.item():.17g}")


def batches(rank, size):
    generator = torch.Generator().manual_seed(rank)
    while True:
        yield torch.randn(size, 6, 16, generator=generator), torch.randint(16, (size,), generator=generator)


if __name__ == "__main__":
    dist.init_process_group(os.environ.get("BACKEND", "gloo"))
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    args = Arguments()
    Trainer(encoder, args, batches(dist.get_rank(), args.per_device_train_batch_size)).train()
    dist.destroy_process_group()
