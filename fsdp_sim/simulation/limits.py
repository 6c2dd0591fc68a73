"""`check_blocks`: how much of a step the simulator goes through."""

from __future__ import annotations

from fsdp_sim.spec import Plan

MAX_BLOCKS = 10_000  # blocks times micro-batches: the simulator goes through each


def check_blocks(layers: int, plan: Plan) -> None:
    """Refuse a step of more than `MAX_BLOCKS` blocks.

    Raises:
        ValueError: it has more.
    """
    blocks = layers * plan.grad_accum
    if blocks > MAX_BLOCKS:
        most = MAX_BLOCKS // layers
        remedy = f"a grad_accum of {most:,} or less, which shows what each further micro-batch costs"
        raise ValueError(
            f"{blocks:,} blocks in a step (layers times grad_accum); the simulator goes up to {MAX_BLOCKS:,}; take "
            f"{remedy if most else 'fewer layers'}"
        )
