"""What people say about strategies, stages of ZeRO, and many GPUs."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import ADAM_BYTES, count, find, issued

MISCONCEPTIONS = (
    Misconception(
        "SHARD_GRAD_OP keeps the parameters replicated and shards only gradients and optimizer state, for a little "
        "more memory.",
        "Its parameters are sharded too: they are whole only from a unit's forward to the end of its backward. In "
        "between the whole model is there, 2 bytes a parameter in bf16 on every rank. That is not a little.",
        ("misconception 4", "misconception 2.8", "misconception 4.125", "misconception 4.139"),
        lambda: count("ALL_GATHER", "backward", api="fsdp1", sharding_strategy="SHARD_GRAD_OP") == 0
        and count("ALL_GATHER", "forward", api="fsdp1", sharding_strategy="SHARD_GRAD_OP") == 5,
    ),
    Misconception(
        "ZeRO-1 halves the memory, and its largest model is as large as DDP's.",
        "Both cannot be true. On 8 GPUs ZeRO-1 stores 9 bytes a parameter instead of 16 with fp32 Adam: a model 1.8 "
        "times as large fits.",
        ("misconception 1.26",),
        lambda: 4 + 4 + 8 / 8 == 9 and round(ADAM_BYTES / 9, 1) == 1.8,
    ),
    Misconception(
        "ZeRO is about optimizers and FSDP about layers: different levels.",
        "FSDP implements stages 2 and 3, and a hybrid of 3 with replicas. ZeRO-3 also frees each layer early.",
        ("misconception 3.18",),
    ),
    Misconception(
        "Put DDP inside FSDP, or FSDP inside DDP.",
        "Neither. Replicas of shard groups are one setting: a mesh of two dimensions, (replicate, shard), called HSDP "
        "or HYBRID_SHARD.",
        ("misconception 4.47",),
        lambda: "ALL_REDUCE(layers.0)" in issued("backward", shard_size=2)
        and "REDUCE_SCATTER(layers.0)" in issued("backward", shard_size=2),
    ),
    Misconception(
        "For several nodes give each the master's address and port 29500.",
        "It works, until a second job wants the port. `torchrun` with `--rdzv-backend=c10d --rdzv-endpoint=HOST:PORT` "
        "lets nodes find each other, and join again after a failure.",
        ("misconception 1.30",),
    ),
    Misconception(
        "FSDP is for models of more than a billion parameters.",
        "The question is whether 16 bytes a parameter and the activations fit one GPU, and whether a GPU has enough "
        "tokens to compute on while units travel. No number of parameters answers it.",
        ("misconception 0.27",),
    ),
    Misconception(
        "NO_SHARD behaves like DDP.",
        "It is deprecated and says so. For DDP use DDP.",
        ("misconception 2.9",),
        lambda: "NO_SHARD" in find("torch.distributed.fsdp:ShardingStrategy").__members__,
    ),
    Misconception(
        "Combine FSDP with ZeRO-1 inside the units.",
        "Nothing is left to shard: FSDP's optimizer state is 1/N already.",
        ("misconception 1.29",),
    ),
)  # fmt: skip
