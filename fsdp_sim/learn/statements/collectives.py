"""What people say about collectives and what travels."""

from __future__ import annotations

from fsdp_sim.learn.statements import Misconception
from fsdp_sim.learn.statements.evidence import LAYERS, collectives, count, defaults, find, issued

MISCONCEPTIONS = (
    Misconception(
        "The owner of a layer broadcasts its weights, and the others discard them.",
        "There is no owner. It is an all-gather: every rank sends its slice and receives all the others, and after "
        "use every rank frees the whole. (The ZeRO paper's text has a broadcast; neither FSDP nor DeepSpeed's ZeRO-3 "
        "does.)",
        ("misconception 18", "misconception 3.3", "misconception 3.11", "misconception 4.20", "misconception 4.26",
         "misconception 4.34"),
        lambda: collectives() == {"ALL_GATHER", "REDUCE_SCATTER"},
    ),
    Misconception(
        "FSDP communicates exactly 1.5 times as much as DDP.",
        "Three parameters' worth instead of two is right in elements, if every unit is gathered twice. The root is "
        "gathered once by default, `reshard_after_forward=False` gathers all but once, hybrid sharding changes who "
        "talks to whom, and dtypes change the bytes: with bf16 gathers and an fp32 reduction both come to 8 bytes a "
        "parameter.",
        ("misconception 13",),
        lambda: count("ALL_GATHER") < 2 * (LAYERS + 1)
        and count("ALL_GATHER", reshard_after_forward=False) == LAYERS + 1,
    ),
    Misconception(
        "FSDP communicates as much as an all-reduce.",
        "True of ZeRO-1 and 2, and of FSDP with `reshard_after_forward=False`: one gather and one reduce-scatter. "
        "With full sharding the second gather comes on top.",
        ("misconception 14",),
        lambda: count("ALL_GATHER", "backward", reshard_after_forward=False) == 0 < count("ALL_GATHER", "backward"),
    ),
    Misconception(
        "The optimizer's step all-gathers the updated parameters.",
        "It does not communicate: the next forward gathers. That all-gather belongs to ZeRO-1 and 2, whose parameters "
        "are whole on every rank between steps.",
        ("misconception 3.8", "misconception 3.10"),
        lambda: issued("optimizer") == ["OPTIM"] and "ALL_GATHER(bucket.0)" in issued("optimizer", api="zero1"),
    ),
    Misconception(
        "DDP scales to about 8 GPUs, FSDP to more than 100.",
        "DDP scales to hundreds while the model fits one GPU. What limits either is the bandwidth for the work each "
        "GPU does, and how large a batch still helps.",
        ("misconception 1.13",),
    ),
    Misconception(
        "Timing FSDP with gloo on a laptop shows its communication.",
        "gloo's reduce-scatter moves as much as an all-reduce, and streams and events of a CPU do nothing. On CPU "
        "count operations and elements, and take times from the simulator or from a GPU.",
        ("misconception 33",),
    ),
    Misconception(
        "In a gather one GPU gathers and the other sends.",
        "An all-gather is symmetric: all send, all receive, all end with the same.",
        ("misconception 2.15",),
    ),
    Misconception(
        "Gradients are sent to the GPU that owns the layer, which sums them.",
        "A reduce-scatter gives each rank its slice of the *average* of every gradient. Every rank does as much of "
        "the adding as any other.",
        ("misconception 4.21", "misconception 4.28"),
        lambda: count("REDUCE_SCATTER", "backward") == LAYERS + 1,
    ),
    Misconception(
        "Forward and backward all-reduce the shards.",
        "A unit is all-gathered twice (for forward and for backward), and its gradient is reduce-scattered once. An "
        "all-reduce appears only between the replicas of hybrid sharding.",
        ("misconception 4.45",),
        lambda: "ALL_REDUCE" not in collectives() and "ALL_REDUCE" in collectives(shard_size=2),
    ),
    Misconception(
        "Communication grows because layers are processed one after the other.",
        "It grows because parameters are gathered a second time for backward: three parameters' worth instead of two.",
        ("misconception 4.23",),
    ),
    Misconception(
        "DDP only ever communicates gradients.",
        "It also broadcasts rank 0's parameters at the start, and buffers before forwards.",
        ("misconception 0.4",),
        lambda: defaults("torch.nn.parallel:DistributedDataParallel", init_sync=True),
    ),
    Misconception(
        "FSDP is a backend of `torch.distributed`.",
        "It changes or wraps modules and calls collectives of a process group. The backend is what carries these out: "
        "NCCL, gloo.",
        ("misconception 4.42",),
        lambda: "fsdp" not in find("torch.distributed:Backend").backend_list,
    ),
)  # fmt: skip
