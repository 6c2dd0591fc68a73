"""The copies and the two collectives, as functions over a list of parameters: no modules, no hooks, no order.

[Note: flat buffers]  A unit's parameters travel in one collective. With W ranks and two parameters a, b:

    all-gather       G = | a0 b0 | a1 b1 | ... |     each rank copies its own piece in ("copy-in"), the collective
                                                     fills in the others', in place, and the pieces of each parameter
                                                     are copied out side by side: U_a = a0 a1 ..., U_b = b0 b1 ...
    reduce-scatter   I = | a0 b0 | a1 b1 | ... |     the gradients copied into the same layout; rank r receives the
                     O = | ar br |                   mean of piece r, of which the sharded gradients are views

[Note: where streams would go]  On CUDA each function below runs on the stream its docstring names, and "wait" makes
a stream wait for an event while the CPU runs ahead. On CPU there is one thread and gloo: a collective is issued with
``async_op=True`` and runs beside the computation that follows; "wait" blocks the thread, at the very place where
torch's compute stream would wait.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import ProcessGroup, ReduceOp, Work

from fsdp_sim.mini import recording
from fsdp_sim.mini.param import FSDPParam, local_tensor
from fsdp_sim.timeline import RECORDER, Lane, Memory, Op

# torch 2.13 renamed both; the old names still work there but warn
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class PendingCollective:
    """A collective that was issued and must be waited for before its output is read (torch: an event or a Work)."""

    def __init__(self, op: Op, unit: str, buffer: torch.Tensor, group: ProcessGroup, waits_on: int) -> None:
        self.seq = RECORDER.begin(
            op, unit, waits_on=(waits_on,), bytes=buffer.numel() * buffer.itemsize, group_size=group.size(),
            dtype=str(buffer.dtype).removeprefix("torch."),
        )  # fmt: skip
        self._end_s: float | None = None

    def issued(self, work: Work) -> PendingCollective:
        self._work = work
        if self.seq >= 0 and not hasattr(work, "end_s"):  # a Work of fsdp_sim.ranks knows its times; gloo's does not
            with suppress(RuntimeError):  # nor has gloo's reduce-scatter a future: its end is when `wait` returned
                work.get_future().add_done_callback(self._note_end)
        return self

    def _note_end(self, _: Any) -> None:
        self._end_s = time.monotonic()

    def wait(self) -> None:
        self._work.wait()
        if self.seq >= 0:
            end_s = getattr(self._work, "end_s", None) or self._end_s
            RECORDER.end(self.seq, start_s=getattr(self._work, "start_s", None), end_s=end_s)


@dataclass(frozen=True)
class AllGatherResult:
    """An all-gather under way. Whoever holds this keeps G alive.

    ``output`` and ``pending`` are None when there is one rank and nothing to gather.
    """

    unit: str
    output: torch.Tensor | None  # G, 1D: W * sum(split_sizes)
    split_sizes: list[int]  # padded elements each parameter contributes per rank
    pending: PendingCollective | None

    def record_free(self) -> None:
        """Say that G goes: called where its last holder lets go of this result."""
        if self.output is not None:
            recording.freed(Memory.AG_OUTPUT, self.unit, self.output.nbytes, Lane.AG_COPY_IN)


@torch.no_grad()
def foreach_all_gather(
    fsdp_params: list[FSDPParam], group: ProcessGroup, unit: str, waits_on: int = -1
) -> AllGatherResult:
    """Allocate G, copy this rank's shards into their place in it, issue the all-gather.

    Streams: allocation and copy-in on the all-gather copy-in stream, the collective on the all-gather stream.
    """
    inputs = [p.all_gather_input for p in fsdp_params]  # each 1D, padded
    split_sizes = [t.numel() for t in inputs]
    if group.size() == 1:
        return AllGatherResult(unit, None, split_sizes, None)
    shard_numel = sum(split_sizes)
    output = inputs[0].new_empty(group.size() * shard_numel)  # G
    recording.allocated(Memory.AG_OUTPUT, unit, output.nbytes, Lane.AG_COPY_IN)
    own = output.narrow(0, group.rank() * shard_numel, shard_numel)  # in place: the input is part of the output
    with RECORDER.span(Op.AG_COPY_IN, unit, waits_on=(waits_on,)) as copy_in:
        torch._foreach_copy_(list(own.split(split_sizes)), inputs)
    with RECORDER.label(unit):
        pending = PendingCollective(Op.ALL_GATHER, unit, output, group, copy_in)
        pending.issued(_all_gather(output, own, group=group, async_op=True))
    return AllGatherResult(unit, output, split_sizes, pending)


@torch.no_grad()
def foreach_all_gather_copy_out(result: AllGatherResult, fsdp_params: list[FSDPParam]) -> int:
    """Wait for the all-gather, allocate the unsharded parameters, copy G into them. Stream: compute.

    Returns:
        the ``seq`` of the copy-out in the timeline (torch: the copy-out event).
    """
    if result.pending is not None:
        result.pending.wait()
    for p in fsdp_params:
        p.alloc_unsharded_param()
        recording.allocated(Memory.UNSHARDED, result.unit, p.unsharded_bytes, Lane.COMPUTE)
    outs = [p.all_gather_output for p in fsdp_params]  # each 1D: W * padded elements
    waits_on = () if result.pending is None else (result.pending.seq,)
    with (
        RECORDER.span(Op.AG_COPY_OUT, result.unit, waits_on=waits_on) as copy_out,
        _unsafe_preserve_version_counter(tuple(outs)),  # the same values as when autograd saved them
    ):
        if result.output is None:
            torch._foreach_copy_(outs, [p.all_gather_input for p in fsdp_params])
        else:
            pieces = result.output.view(fsdp_params[0].world_size, -1)  # (W, sum of padded elements)
            rows = [out.view(pieces.size(0), -1) for out in outs]  # each (W, padded elements)
            torch.split_with_sizes_copy(pieces, result.split_sizes, dim=1, out=rows)
    return copy_out


@dataclass(frozen=True)
class ReduceScatterState:
    """A reduce-scatter under way. Whoever holds this keeps I alive.

    ``pending`` is None when there is one rank and nothing to reduce.
    """

    unit: str
    fsdp_params: list[FSDPParam]  # those whose gradients are in it
    input: torch.Tensor  # I, 1D: W * chunk
    output: torch.Tensor  # O, 1D: chunk
    pending: PendingCollective | None


@torch.no_grad()
def foreach_reduce(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    group: ProcessGroup,
    unit: str,
    waits_on: int = -1,
) -> ReduceScatterState:
    """Copy the gradients of whole parameters into I, free them, issue the reduce-scatter that averages over the ranks.

    Streams: copy-in on the compute stream; O and the collective on the reduce-scatter stream.

    Args:
        unsharded_grads: owns the gradients; emptied after the copy-in, which frees them.
    """
    world_size = group.size()
    numel = world_size * sum(p.all_gather_input.numel() for p in fsdp_params)
    reduce_input = unsharded_grads[0].new_empty(numel)  # I
    recording.allocated(Memory.RS_INPUT, unit, reduce_input.nbytes, Lane.COMPUTE)
    with RECORDER.span(Op.RS_COPY_IN, unit, waits_on=(waits_on,)) as copy_in:
        # chunk each gradient into W pieces on dim 0 (zeros below the last row) and lay piece r of all of them in row r
        torch._chunk_cat(unsharded_grads, dim=0, num_chunks=world_size, out=reduce_input.view(world_size, -1))
    unsharded_grads.clear()
    recording.freed_grads(fsdp_params, unit)
    output = reduce_input.new_empty(numel // world_size)  # O
    recording.allocated_storage(Memory.RS_OUTPUT, unit, output, Lane.REDUCE_SCATTER)
    if world_size == 1:
        output.copy_(reduce_input)
        return ReduceScatterState(unit, fsdp_params, reduce_input, output, None)
    with RECORDER.label(unit):
        pending = PendingCollective(Op.REDUCE_SCATTER, unit, reduce_input, group, copy_in)
        pending.issued(_reduce_scatter(output, reduce_input, op=ReduceOp.AVG, group=group, async_op=True))
    return ReduceScatterState(unit, fsdp_params, reduce_input, output, pending)


@torch.no_grad()
def foreach_reduce_finish(state: ReduceScatterState) -> None:
    """Wait for the reduce-scatter and hand out O. Sharded gradients are views of it, so O lives until ``zero_grad``.

    On CUDA this is queued behind the collective on the reduce-scatter stream when that is issued. On CPU there is
    nothing to queue on, so it happens when somebody waits.
    """
    if state.pending is not None:
        state.pending.wait()
    offset = 0
    for p in state.fsdp_params:
        rows = state.output[offset : offset + p.sharded_size.numel()].view(p.sharded_size)  # (0 to rows, ...)
        offset += p.all_gather_input.numel()
        if p.sharded_param.grad is None:
            p.sharded_param.grad = p.to_sharded_dtensor(rows)
        else:  # gradient accumulation
            local_tensor(p.sharded_param.grad).add_(rows)
        for hook in (getattr(p.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(p.sharded_param)
    recording.freed(Memory.RS_INPUT, state.unit, state.input.nbytes, Lane.COMPUTE)
