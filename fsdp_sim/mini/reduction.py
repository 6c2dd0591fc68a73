"""What follows a reduce-scatter: in hybrid sharding the all-reduce over those that hold the same shard, a user's hook.

Hybrid sharding reduces twice, see [Note: two dimensions] in `hsdp`. With `set_requires_all_reduce(False)` the second
waits for a later micro-batch, and the partial sums of those before are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed import ProcessGroup

from fsdp_sim.mini import collectives, versions
from fsdp_sim.mini.collectives import ReduceScatterState
from fsdp_sim.mini.streams import Streams


class AllReduceState(NamedTuple):
    """O, which must outlive its all-reduce (torch: `_fsdp_param_group.AllReduceState`)."""

    output: torch.Tensor
    event: torch.Event | None  # end of the all-reduce, on a device


@torch.no_grad()
def add_partial(
    state: ReduceScatterState, partial: torch.Tensor | None, all_reduce_follows: bool, ctx: Streams
) -> torch.Tensor | None:
    """Hybrid sharding: add what earlier micro-batches scattered and did not all-reduce. Stream: reduce-scatter.

    Returns:
        the sum if it still waits for its all-reduce, else None: it is in ``state.output``.
    """
    assert state.output is not None
    with ctx.device_handle.stream(ctx.reduce_scatter_stream):
        if all_reduce_follows:
            if partial is not None:
                state.output += partial
            return None
        output, state.output = state.output, None
        if partial is None:
            return output
        partial += output
        return partial


@torch.no_grad()
def all_reduce(state: ReduceScatterState, group: ProcessGroup, ctx: Streams) -> AllReduceState:
    """Hybrid sharding: sum O, already scattered, over the ranks that hold the same shard. Stream: all-reduce.

    Returns:
        O and, on a device, the event of its end. Until then nobody else may get the memory of O, which was allocated
        on another stream: the caller keeps it.
    """
    stream = state.post_reduce_stream = ctx.all_reduce_stream
    stream.wait_stream(ctx.reduce_scatter_stream)
    output = state.output
    assert output is not None
    with ctx.device_handle.stream(stream):
        state.work = collectives.all_reduce_single(output, state.division.all_reduce_op, group, ctx.on_cpu)
        return AllReduceState(output, stream.record_event())


def run_all_reduce_hook(
    state: ReduceScatterState, hook: Callable[[torch.Tensor], None], stream: torch.Stream, ctx: Streams
) -> AllReduceState | None:
    """The user's hook on O, behind the last collective. Stream: the user's, or the all-reduce stream.

    Returns:
        O and the event of the hook's end where the caller keeps O until then, as after an all-reduce.
    """
    state.wait_for_work()
    state.post_reduce_stream = stream
    stream.wait_stream(ctx.reduce_scatter_stream)
    output = state.output
    assert output is not None
    with torch.no_grad(), ctx.device_handle.stream(stream):
        hook(output)
        return AllReduceState(output, stream.record_event()) if versions.HOOKED_OUTLIVES_ITS_HOOK else None


class Reduction(NamedTuple):
    """What a group keeps of a reduction until the next one, or the end of backward."""

    partial: torch.Tensor | None  # reduce-scattered, for a later micro-batch to all-reduce
    all_reduce_state: AllReduceState | None
    event: torch.Event | None  # end of the reduction, on a device


def after_reduce_scatter(
    state: ReduceScatterState,
    partial: torch.Tensor | None,
    replicas: ProcessGroup | None,
    all_reduce_grads: bool,
    hook: Callable[[torch.Tensor], None] | None,
    hook_stream: torch.Stream | None,
    ctx: Streams,
) -> Reduction:
    """What follows a unit's reduce-scatter: the all-reduce of hybrid sharding, the user's hook, the sharded gradients.

    Args:
        partial: what earlier micro-batches scattered and did not all-reduce.
        replicas: the ranks that hold the same shard.
    """
    all_reduce_state = None
    if replicas is not None:
        state.wait_for_work()
        _read = state.output, partial  # both stay alive until all that reads them is queued
        partial = add_partial(state, partial, all_reduce_grads, ctx)
        if not all_reduce_grads:
            return Reduction(partial, None, state.post_reduce_stream.record_event())
        all_reduce_state = all_reduce(state, replicas, ctx)
    if hook is not None:
        stream = hook_stream or ctx.all_reduce_stream
        all_reduce_state = run_all_reduce_hook(state, hook, stream, ctx) or all_reduce_state
    event = None if ctx.on_cpu else state.finish(ctx)  # on CPU when somebody waits
    return Reduction(partial, all_reduce_state, event)
