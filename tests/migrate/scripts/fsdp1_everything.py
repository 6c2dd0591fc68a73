"""FSDP1 with most of what it can be told, gathered from the examples of its time."""

import functools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import (
    FullyShardedDataParallel as FSDP,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class DecoderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab=50, width=16, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList([DecoderLayer(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def save(model, optimizer, rank, path):
    policy = FullStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        state = model.state_dict()
        optim_state = FSDP.optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"model": state, "optim": optim_state}, path)


def load(model, optimizer, path):
    saved = torch.load(path)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(saved["model"])
        to_load = FSDP.optim_state_dict_to_load(model, optimizer, saved["optim"])
        optimizer.load_state_dict(to_load)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer})
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FSDP(
        Model(),
        auto_wrap_policy=wrap,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        mixed_precision=half if os.environ.get("HALF", "1") == "1" else None,
        cpu_offload=CPUOffload(offload_params=False),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers=True,
        use_orig_params=True,
        sync_module_states=torch.cuda.is_available(),  # FSDP1 sends from a GPU alone
        device_id=torch.device("cpu"),
    )
    # recompute each layer in backward
    apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT),
        check_fn=lambda module: isinstance(module, DecoderLayer),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    path = os.path.join(os.environ.get("OUT_DIR", "."), "fsdp1.pt")
    torch.manual_seed(100 + rank)
    for step in range(4):
        tokens = torch.randint(50, (2, 9))
        if step % 2 == 0:
            with model.no_sync():  # keep the gradients here
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
        else:
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            norm = model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                print(f"norm {norm.item():.4f}")
        if rank == 0:
            print(f"loss {loss.item():.17g}")
    save(model, optimizer, rank, path)
    dist.barrier()
    load(model, optimizer, path)
    tokens = torch.randint(50, (2, 9))
    loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    if rank == 0:
        print(f"loss {loss.item():.17g}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
