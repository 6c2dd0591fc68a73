"""What to try against each culprit, in the names of torch's API that the trace is of."""

from __future__ import annotations

from collections.abc import Callable

from fsdp_sim.diagnose.culprits import Culprit
from fsdp_sim.diagnose.tip import Facts, Settings, Tip, always, everywhere, fsdp2
from fsdp_sim.spec import Cluster, Plan

_FORWARD = {
    "fsdp2": "set_modules_to_forward_prefetch([next block]) on each block: its all-gather is then issued before the "
    "block before it computes",
    "fsdp1": "FullyShardedDataParallel(forward_prefetch=True)",
}
_FORWARD_PREFETCH = Tip(
    _FORWARD,
    lambda facts: facts.gathers and not facts.forward_prefetch,
    lambda plan, cluster: {"forward_prefetch": True if plan.api == "fsdp1" else 1},
)
_BACKWARD_PREFETCH = Tip(
    {
        "fsdp2": "set_modules_to_backward_prefetch([block before, and the one before that]): one unit ahead is the "
        "default, two start earlier and hold one more unit's parameters",
        "fsdp1": "backward_prefetch=BackwardPrefetch.BACKWARD_PRE (the default), if it was changed",
    },
    lambda facts: facts.backward_gathers,
    lambda plan, cluster: {"backward_prefetch": "BACKWARD_PRE" if plan.api == "fsdp1" else 2},
)
_LARGER_UNITS = Tip(
    {
        "fsdp2": "larger units: one fully_shard([block, block]) for two or more blocks",
        "fsdp1": "larger units: a larger min_num_params in size_based_auto_wrap_policy, or wrap several blocks at once",
        "ddp": "larger buckets: DistributedDataParallel(bucket_cap_mb=...), 25 by default",
        "": "larger messages: fewer, larger units or buckets",
    },
    lambda facts: facts.communicates,
)


def _double(plan: Plan, cluster: Cluster) -> Settings:
    return {"micro_batch": 2 * plan.micro_batch}


_MICRO_BATCH = everywhere(
    "a larger micro-batch, or longer sequences: more compute per byte that is communicated", change=_double
)
_LARGER_KERNELS = everywhere("a larger micro-batch, or longer sequences: more compute per kernel", change=_double)
_GATHER_BF16 = Tip(
    {
        "fsdp2": "MixedPrecisionPolicy(param_dtype=torch.bfloat16): all-gathers of half the bytes",
        "fsdp1": "MixedPrecision(param_dtype=torch.bfloat16): all-gathers of half the bytes",
    },
    lambda facts: facts.gather_dtype in ("fp32", "fp64"),
    always(param_dtype="bf16"),
)
_REDUCE_BF16 = Tip(
    {
        "fsdp2": "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16): reductions of half the bytes, less exact sums",
        "fsdp1": "MixedPrecision(reduce_dtype=torch.bfloat16): reductions of half the bytes, less exact sums",
        "ddp": "register_comm_hook(None, bf16_compress_hook): reductions of half the bytes, less exact sums",
    },
    lambda facts: facts.reduce_dtype in ("fp32", "fp64"),
    always(reduce_dtype="bf16"),
)
_KEEP = Tip(
    {
        "fsdp2": "reshard_after_forward=False: no all-gathers in backward, if the unsharded parameters fit",
        "fsdp1": "ShardingStrategy.SHARD_GRAD_OP: no all-gathers in backward, if the unsharded parameters fit",
    },
    lambda facts: facts.backward_gathers,
    lambda plan, cluster: (
        {"sharding_strategy": "SHARD_GRAD_OP"} if plan.api == "fsdp1" else {"reshard_after_forward": False}
    ),
)
_HSDP = Tip(
    {
        "fsdp2": "HSDP: a 2-D mesh, init_device_mesh('cuda', (nodes, GPUs of a node)), gathers within a node only",
        "fsdp1": "ShardingStrategy.HYBRID_SHARD gathers within a node only",
    },
    lambda facts: facts.group_size > 8,
    lambda plan, cluster: (
        {"sharding_strategy": "HYBRID_SHARD"} if plan.api == "fsdp1" else {"shard_size": cluster.node_size}
    ),
)
_NO_HSDP = Tip(
    {
        "fsdp2": "a 1-D mesh, no HSDP: groups of more than a node gather over the network anyway, and all-reduce too",
        "fsdp1": "ShardingStrategy.FULL_SHARD: groups of more than a node gather over the network anyway, and "
        "all-reduce too",
    },
    lambda facts: facts.replicates and facts.group_size > 8,
    lambda plan, cluster: (
        {"sharding_strategy": "FULL_SHARD", "shard_size": None} if plan.api == "fsdp1" else {"shard_size": None}
    ),
)


def _order(facts: Facts) -> bool:
    """Whether another order of collectives may help."""
    return not facts.saturated


_ACCUMULATE = Tip(
    {
        "fsdp2": "gradient accumulation with set_requires_gradient_sync(False) on all but the last micro-batch: one "
        "reduction for several",
        "fsdp1": "gradient accumulation under no_sync() on all but the last micro-batch: one reduction for several",
        "ddp": "gradient accumulation under no_sync() on all but the last micro-batch: one reduction for several",
    },
    change=lambda plan, cluster: {"grad_accum": 2 * plan.grad_accum, "requires_gradient_sync": "last"},
)
_FEWER_SYNCS = everywhere(
    "fewer host syncs: no .item(), .cpu(), print of a tensor or nonzero() within the step; log every n steps",
    lambda facts: not facts.on_cpu,
)
_SUM_WHOLE = Tip(
    {
        "fsdp2": "set_requires_gradient_sync(False) on all but the last micro-batch, if whole gradients fit: they are "
        "added up on the device, reduced and copied once",
    },
    change=lambda plan, cluster: {"grad_accum": max(2, plan.grad_accum), "requires_gradient_sync": "last"},
)
_NO_OFFLOAD = everywhere("no offload, if shards and states fit into the device", change=always(cpu_offload=False))
_NO_COPIES = fsdp2("no offload of activations, if they fit into the device", change=always(activation_offload=None))
_COMPILE = everywhere(
    "torch.compile of each block: fewer kernels for the CPU to launch",
    lambda facts: not facts.on_cpu,
    always(compile=True),
)

_ENDS = fsdp2(
    "a smaller root, which is gathered first and reduced last: fully_shard the embedding and the head as units of "
    "their own",
    change=lambda plan, cluster: {"wrap": "embed_block_head" if plan.wrap == "block" else plan.wrap},
)

TIPS: dict[Culprit, tuple[Tip, ...]] = {
    Culprit.FIRST_ALL_GATHER: (
        fsdp2("model.unshard(async_op=True) before the batch is loaded: the first all-gather runs meanwhile"),
        fsdp2(
            "set_post_optim_event(event): the first all-gather waits for it, not for all that was issued before",
            change=always(post_optim_event=True),
        ),
        _ENDS,
        Tip({"fsdp1": "a smaller root: wrap the embedding and the head as units of their own"}),
        _GATHER_BF16,
        _MICRO_BATCH,
    ),
    Culprit.LAST_REDUCTIONS: (
        _ACCUMULATE,
        _REDUCE_BF16,
        _ENDS,
        Tip(
            {
                "fsdp1": "a smaller last unit: wrap the embedding and the head as units of their own",
                "ddp": "a smaller last bucket: DistributedDataParallel(bucket_cap_mb=...)",
            }
        ),
        _MICRO_BATCH,
    ),
    Culprit.LAST_ALL_GATHERS: (
        Tip(
            dict.fromkeys(
                ("zero1", "zero2"),
                "FSDP (fully_shard) gathers each unit when it is needed, behind the compute of the one before",
            )
        ),
        _GATHER_BF16,
    ),
    Culprit.IN_OPTIMIZER: (
        fsdp2("AdamW, whose step needs no other rank, if the optimizer is Muon", change=always(optimizer="adamw")),
        everywhere(
            "fewer steps for as many tokens: a larger micro-batch, or gradients of several added up", change=_double
        ),
    ),
    Culprit.HEAD_OF_LINE: (
        fsdp2(
            "set_separate_reduce_scatter_group(True) (torch 2.13): reductions get a communicator of their own",
            _order,
            always(separate_reduce_scatter_group=True),
        ),
        _REDUCE_BF16,
        _MICRO_BATCH,
        _GATHER_BF16,
        _KEEP,
        _HSDP,
        _NO_HSDP,
        Tip({"fsdp1": "FSDP2 (fully_shard), which can give reductions a communicator of their own"}),
    ),
    Culprit.RATE_LIMITER: (
        Tip(
            {"fsdp1": "limit_all_gathers=False, if memory allows: the CPU then runs further ahead"},
            change=always(limit_all_gathers=False),
        ),
        Tip({"fsdp1": "FSDP2 (fully_shard), which needs no limiter: its memory does not depend on record_stream"}),
        _LARGER_UNITS,
    ),
    Culprit.CPU_LATE: (
        _FEWER_SYNCS,
        _LARGER_KERNELS,
        _COMPILE,
        _FORWARD_PREFETCH,
        _LARGER_UNITS,
    ),
    Culprit.LAUNCHES: (_LARGER_KERNELS, _COMPILE, _FEWER_SYNCS),
    Culprit.COMPUTING_THREAD: (_FORWARD_PREFETCH, _BACKWARD_PREFETCH),
    Culprit.SYNCHRONOUS: (
        everywhere(
            "judge overlap on GPUs (NCCL), or with the mini-FSDP of fsdp_sim, whose collectives run beside compute"
        ),
    ),
    Culprit.ASYNCHRONOUS: (
        fsdp2(
            "_set_unshard_async_op(False), the default: all-gathers on a stream of their own",
            change=always(unshard_async_op=False),
        ),
        Tip({"fsdp2": _FORWARD["fsdp2"]}, lambda facts: not facts.forward_prefetch, always(forward_prefetch=1)),
    ),
    Culprit.RS_BUFFER: (
        fsdp2(
            "set_reduce_scatter_max_input_buffers(2) (torch 2.13): compute runs ahead, for one more buffer",
            _order,
            lambda plan, cluster: {"reduce_scatter_max_input_buffers": plan.reduce_scatter_max_input_buffers + 1},
        ),
        _REDUCE_BF16,
        _MICRO_BATCH,
        _ACCUMULATE,
    ),
    Culprit.REDUCTION: (_REDUCE_BF16, _ACCUMULATE, _MICRO_BATCH, _NO_HSDP),
    Culprit.TOKENS: (
        fsdp2(
            "fewer ranks that share out the experts (expert_parallel): more tokens stay on their rank, or in its node, "
            "for more bytes of experts to gather",
            change=lambda plan, cluster: {
                "expert_parallel": plan.expert_parallel // 2 if plan.expert_parallel % 2 == 0 else 1
            },
        ),
    ),
    Culprit.IN_LINE: (
        everywhere(
            "for weights: gather them one unit ahead (fully_shard does; in a compiled graph the passes that bucket and "
            "reorder collectives)"
        ),
        everywhere(
            "for activations: fewer ranks in that group, within one node; or split the micro-batch in two, so that one "
            "half computes while the other travels"
        ),
    ),
    Culprit.PIPELINE: (
        everywhere("more micro-batches per step, or an interleaved or zero-bubble schedule: a smaller bubble"),
        everywhere("stages that compute equally long: move layers from the slowest"),
    ),
    Culprit.NETWORK: (_MICRO_BATCH, _GATHER_BF16, _KEEP, _HSDP, _NO_HSDP),
    Culprit.SMALL: (_LARGER_UNITS, _MICRO_BATCH, _HSDP),
    Culprit.SLOW_RANK: (
        everywhere("look at the rank that comes last: its data loading, longer sequences, a hot or throttled device"),
        everywhere("the same work for every rank: pack or pad sequences to equal numbers of tokens"),
    ),
    Culprit.CPU_OPTIMIZER: (
        everywhere(
            "OMP_NUM_THREADS: the cores of the node over its ranks; torchrun sets it to 1, and one core moves far less "
            "than a rank's share of what the memory can"
        ),
        everywhere("a fused optimizer: AdamW(..., fused=True)", change=always(optimizer_impl="fused")),
        _SUM_WHOLE,
        _NO_OFFLOAD,
    ),
    Culprit.CPU_SUMS: (_SUM_WHOLE, _NO_OFFLOAD),
    Culprit.ACTIVATIONS: (
        fsdp2(
            "checkpoint_wrapper on each block: only its input is kept and copied",
            change=always(activation_checkpointing="full"),
        ),
        _NO_COPIES,
    ),
    Culprit.COPIES: (
        Tip(
            {"fsdp2": "CPUOffloadPolicy(pin_memory=True), or no offload: shards come over PCIe before each all-gather"},
            lambda facts: facts.shards_copied,
        ),
        _LARGER_UNITS,
    ),
    Culprit.HOST: (
        everywhere("a fused optimizer: AdamW(..., fused=True)"),
        everywhere("logging, data loading and clip_grad_norm_'s .item() out of the way: read numbers every n steps"),
    ),
    Culprit.BETWEEN_KERNELS: (_COMPILE, _LARGER_KERNELS),
    Culprit.UNKNOWN: (),
}


def _keeps(kept: str | None) -> Callable[[Plan, Cluster], Settings]:
    """Keep more than a plan does, of which blocks are computed again."""
    return lambda plan, cluster: {
        "activation_checkpointing": kept if plan.activation_checkpointing is not None else None
    }


BUSY = (  # what to try whatever compute waits for: first of all so that it is shorter
    everywhere(
        "torch.compile of each block: kernels that read and write memory less often", change=always(compile=True)
    ),
    everywhere("no activation checkpointing, if all activations fit: nothing is computed again", change=_keeps(None)),
    everywhere(
        "selective activation checkpointing, if it fits: attention and every other matmul are not computed again",
        change=_keeps("selective"),
    ),
    everywhere("compute in bf16: matmuls on tensor cores, and half the bytes", change=always(param_dtype="bf16")),
    fsdp2(
        "copies of activations on a stream of their own, beside compute (OffloadActivations)",
        change=lambda plan, cluster: {"activation_offload": plan.activation_offload and "streams"},
    ),
    _NO_COPIES,
    everywhere("a fused optimizer: AdamW(..., fused=True)", change=always(optimizer_impl="fused")),
    everywhere(
        "DCP's async_save: training waits for a checkpoint's copy to the CPU's memory, not for the storage",
        change=lambda plan, cluster: {"async_save": True} if plan.save_every else {},
    ),
    everywhere(
        "a checkpoint half as often; a failure then costs up to twice the steps",
        change=lambda plan, cluster: {"save_every": 2 * plan.save_every} if plan.save_every else {},
    ),
    everywhere(
        "each block a unit, not the whole model one: all but the first are then gathered beside compute",
        change=lambda plan, cluster: {"wrap": "block" if plan.wrap == "root" else plan.wrap},
    ),
)


def tips(culprit: Culprit, facts: Facts) -> list[str]:
    """What to try, the most promising first."""
    return [tip.by_api[facts.api] for tip in TIPS[culprit] if facts.api in tip.by_api and tip.when(facts)]
