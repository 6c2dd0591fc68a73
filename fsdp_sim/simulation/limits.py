"""`check_blocks`, `check_each`: how much of a step the simulator goes through."""

from __future__ import annotations

from fsdp_sim.spec import Model, Plan

MAX_BLOCKS = 10_000  # blocks times micro-batches: the simulator goes through each
MAX_LOOPED = 1_024  # experts of a layer, one after the other
MAX_PREFETCHED = 1_000_000  # blocks times the depth of explicit prefetch: each layer has a list of so many


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


def check_each(model: Model, plan: Plan) -> None:
    """Refuse experts in a loop, and lists of layers to prefetch, that are longer than anyone's.

    Raises:
        ValueError: they are.
    """
    if (model.n_expert or 0) > MAX_LOOPED and plan.loops_experts:
        raise ValueError(
            f"{model.name} has {model.n_expert:,} experts in a layer, which compute one after the other with "
            f"experts_impl='loop' and where they are quantised; the simulator goes up to {MAX_LOOPED:,} of those: take "
            f"experts_impl='grouped', and no base_quantization"
        )
    layers = model.n_layer + model.n_encoder_layer
    for name in ("forward_prefetch", "backward_prefetch"):
        depth = getattr(plan, name)
        if type(depth) is int and min(depth, layers) * layers * plan.grad_accum > MAX_PREFETCHED:
            most = max(1, MAX_PREFETCHED // (layers * plan.grad_accum))
            raise ValueError(
                f"Plan.{name} is {depth:,} for each of {layers:,} layers in {plan.grad_accum:,} micro-batches; the "
                f"simulator goes up to {MAX_PREFETCHED:,} in all: take a depth of {most:,} or less"
            )
