"""`Plan`: how the model is trained. Its fields carry torch's names and torch's defaults."""

from __future__ import annotations

from typing import Literal

from fsdp_sim.spec.fields import field, one_of, spec, whole

_DEPTH = one_of(None).explained("implicit prefetch") | whole(1).explained("depth of explicit prefetch")


@spec
class Plan:
    """How a model is sharded, prefetched and stepped.

    Attributes:
        api: ``fsdp2`` is ``torch.distributed.fsdp.fully_shard``.
        reshard_after_forward: the argument of ``fully_shard``, given to every unit. True frees parameters after
            forward, False keeps them until backward, None (torch's default) is True for all units but the root.
        forward_prefetch: None issues a unit's all-gather in its own pre-forward. A depth k gives each layer the
            list of the next k layers (``FSDPModule.set_modules_to_forward_prefetch``); the root gets no list.
        backward_prefetch: None prefetches the previous unit of the post-forward order. A depth k gives each layer
            the list of the k layers before it (``set_modules_to_backward_prefetch``); the root gets no list.
        grad_accum: micro-batches per optimizer step.
        requires_gradient_sync: True reduces gradients in every micro-batch, ``"last"`` only in the last one
            (``FSDPModule.set_requires_gradient_sync``).
        micro_batch: sequences per rank and micro-batch.
        seq_len: tokens per sequence.

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

    api: Literal["fsdp2"] = field(one_of("fsdp2"), default="fsdp2")
    reshard_after_forward: bool | None = field(one_of(True, False, None), default=None)
    forward_prefetch: int | None = field(_DEPTH, default=None)
    backward_prefetch: int | None = field(_DEPTH, default=None)
    grad_accum: int = field(whole(1), default=1)
    requires_gradient_sync: bool | Literal["last"] = field(one_of(True, "last"), default=True)
    micro_batch: int = field(whole(1), default=1)
    seq_len: int = field(whole(1), default=1024)
