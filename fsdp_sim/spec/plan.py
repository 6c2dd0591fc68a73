"""`Plan`: how the model is trained. Its fields carry torch's names and torch's defaults."""

from __future__ import annotations

from typing import Any, Literal

from fsdp_sim.spec.fields import Allowed, field, number, one_of, spec, whole

DTYPES = ("fp32", "bf16", "fp16")
Api = Literal["fsdp2", "fsdp1", "ddp", "zero1", "zero2"]
PerMicroBatch = bool | Literal["last"]

_BOOL = one_of(True, False)
_DEPTH = one_of(None).explained("implicit prefetch") | whole(1).explained("depth of explicit prefetch")
_PER_MICRO_BATCH = one_of(True, False, "last")
_NAMES = Allowed(
    "a tuple of names of modules",
    lambda value: isinstance(value, tuple) and len(value) > 0 and all(isinstance(n, str) and n for n in value),
)


@spec
class Plan:
    """How a model is sharded, prefetched and stepped.

    Attributes:
        api: ``fsdp2`` is ``torch.distributed.fsdp.fully_shard``, ``fsdp1`` ``FullyShardedDataParallel``, ``ddp``
            ``DistributedDataParallel``; ``zero1`` shards the optimizer's state, ``zero2`` the gradients too.
        reshard_after_forward: fsdp2, the argument of ``fully_shard``, given to every unit. True frees parameters
            after forward, False keeps them until backward, None (torch's default) is True for all units but the
            root, a number n keeps a slice of 1/n and gathers within groups of n ranks in backward.
        forward_prefetch: fsdp2: None issues a unit's all-gather in its own pre-forward; a depth k gives each layer
            the list of the next k layers (``set_modules_to_forward_prefetch``), the root none. fsdp1: torch's bool,
            None is its default False.
        backward_prefetch: fsdp2: None prefetches the previous unit of the post-forward order; a depth k gives each
            layer the list of the k layers before it (``set_modules_to_backward_prefetch``), the root none. fsdp1:
            ``BACKWARD_PRE`` (torch's default there), ``BACKWARD_POST`` or ``none``; None is the default.
        limit_all_gathers: fsdp1, the rate limiter.
        sharding_strategy: fsdp1. HYBRID_SHARD takes its shard group from ``shard_size``.
        param_dtype: of gathers and compute (``MixedPrecisionPolicy``); None is the dtype of the parameters.
        reduce_dtype: of the gradients' reduction; None is the dtype of the gradients.
        cpu_offload: shards, gradients and the optimizer live in the CPU's memory (``CPUOffloadPolicy``).
        activation_checkpointing: None keeps all activations; ``full`` keeps each block's input and computes the
            block again in backward; a number k does so for every k-th block; ``selective`` keeps the outputs of
            every other matmul and of attention, and computes the rest again.
        shard_size: ranks that share one copy of the parameters (HSDP); None is all of them.
        grad_accum: micro-batches per optimizer step.
        micro_batch: sequences per rank and micro-batch.
        seq_len: tokens per sequence.
        wrap: ``block`` makes each block a unit, ``root`` the whole model one unit, a number the smallest
            modules of at least that many parameters, a tuple of names those modules.
        compile: whether ``torch.compile`` fuses the memory-bound kernels of each block.
        optimizer: what is kept beside each parameter: ``adamw`` two moments, ``sgd_momentum`` one, ``sgd`` none.
        reduce_scatter_max_input_buffers: fsdp2, ``set_reduce_scatter_max_input_buffers``.
        separate_reduce_scatter_group: fsdp2, ``set_separate_reduce_scatter_group``: reduce-scatters have a
            communicator of their own.
        post_optim_event: fsdp2, ``set_post_optim_event``: gathers wait for the optimizer, not for all of compute.
        unshard_async_op: fsdp2, ``_set_unshard_async_op``.
        requires_gradient_sync: reduce gradients in every micro-batch (True) or in the last one only (``last``).
        requires_all_reduce: HSDP: the same for the all-reduce between replicas.
        reshard_after_backward: free parameters after backward: always, or ``last``.
        is_last_backward: wait for the reductions at the end of every backward, or of the ``last`` only.
        gradient_divide_factor: fsdp2, ``set_gradient_divide_factor``; None divides by the number of ranks.
        bucket_cap_mb: ddp and zero: the size of a bucket of gradients in MiB.

    Example:
        >>> Plan(forward_prefetch=1).reshard_after_forward is None
        True
        >>> Plan(forward_prefech=1)
        Traceback (most recent call last):
        TypeError: Plan has no field forward_prefech (given forward_prefech=1); did you mean forward_prefetch?
        >>> Plan(grad_accum=0)
        Traceback (most recent call last):
        ValueError: Plan.grad_accum is 0; it must be a whole number >= 1
    """

    api: Api = field(one_of("fsdp2", "fsdp1", "ddp", "zero1", "zero2"), default="fsdp2")
    reshard_after_forward: bool | int | None = field(one_of(True, False, None) | whole(1), default=None)
    forward_prefetch: int | bool | None = field(_DEPTH | _BOOL.explained("fsdp1"), default=None)
    backward_prefetch: Any = field(
        _DEPTH | one_of("BACKWARD_PRE", "BACKWARD_POST", "none").explained("fsdp1"), default=None
    )
    limit_all_gathers: bool = field(_BOOL, default=True)
    sharding_strategy: str = field(
        one_of("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), default="FULL_SHARD"
    )
    param_dtype: str | None = field(one_of(None, *DTYPES), default=None)
    reduce_dtype: str | None = field(one_of(None, *DTYPES), default=None)
    cpu_offload: bool = field(_BOOL, default=False)
    activation_checkpointing: str | int | None = field(
        one_of(None, "full", "selective") | whole(1).explained("every k-th block"), default=None
    )
    shard_size: int | None = field(one_of(None) | whole(1), default=None)
    grad_accum: int = field(whole(1), default=1)
    micro_batch: int = field(whole(1), default=1)
    seq_len: int = field(whole(1), default=1024)
    wrap: str | int | tuple[str, ...] = field(one_of("block", "root") | whole(1) | _NAMES, default="block")
    compile: bool = field(_BOOL, default=False)
    optimizer: str = field(one_of("adamw", "sgd_momentum", "sgd"), default="adamw")
    reduce_scatter_max_input_buffers: int = field(whole(1), default=1)
    separate_reduce_scatter_group: bool = field(_BOOL, default=False)
    post_optim_event: bool = field(_BOOL, default=False)
    unshard_async_op: bool = field(_BOOL, default=False)
    requires_gradient_sync: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    requires_all_reduce: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    reshard_after_backward: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    is_last_backward: PerMicroBatch = field(_PER_MICRO_BATCH, default=True)
    gradient_divide_factor: float | None = field(one_of(None) | number(above=True), default=None)
    bucket_cap_mb: float = field(number(above=True), default=25.0)
