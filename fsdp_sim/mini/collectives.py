"""The copies and the collectives, as functions over a list of parameters: no modules, no hooks, no order.

[Note: flat buffers]  A unit's parameters travel in one collective. With W ranks and two parameters a, b:

    all-gather       G = | a0 b0 | a1 b1 | ... |     each rank copies its own piece in ("copy-in"), the collective
                                                     fills in the others', in place, and the pieces of each parameter
                                                     are copied out side by side: U_a = a0 a1 ..., U_b = b0 b1 ...
    reduce-scatter   I = | a0 b0 | a1 b1 | ... |     the gradients copied into the same layout; rank r receives the
                     O = | ar br |                   mean of piece r, of which the sharded gradients are views

[Note: which stream]  Each docstring names the streams it uses, see `streams`. "Wait" makes a stream wait; on CPU it
blocks this thread, at the very place where a GPU's compute stream would wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed import ProcessGroup, Work

from fsdp_sim.mini import versions
from fsdp_sim.mini.labels import record_operation
from fsdp_sim.mini.offload import grad_to_cpu
from fsdp_sim.mini.param import FSDPParam, Piece, local_tensor
from fsdp_sim.mini.precision import Division, all_gather_inputs, div_if_needed, to_dtype
from fsdp_sim.mini.streams import Streams
from fsdp_sim.states import TrainingState


def all_gather_single(output: torch.Tensor, own: torch.Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
    """``output`` (W * n), ``own`` (n). Returns a `Work` if ``async_op``."""
    return getattr(dist, versions.ALL_GATHER)(output, own, group=group, async_op=async_op)


def reduce_scatter_single(
    output: torch.Tensor, whole: torch.Tensor, op: Any, group: ProcessGroup, async_op: bool
) -> Any:
    """``output`` (n), ``whole`` (W * n)."""
    return getattr(dist, versions.REDUCE_SCATTER)(output, whole, op=op, group=group, async_op=async_op)


def all_reduce_single(tensor: torch.Tensor, op: Any, group: ProcessGroup, async_op: bool) -> Any:
    """``tensor`` (n), in place."""
    return dist.all_reduce(tensor, op, group, async_op=async_op)


@dataclass(frozen=True, eq=False)
class AllGatherResult:
    """An all-gather under way. Whoever holds this keeps G alive."""

    output: torch.Tensor | None  # G, 1D: W * sum(split_sizes); None when there is one rank and nothing to gather
    pieces: list[list[Piece]]  # of each parameter
    split_sizes: list[int]  # elements of all pieces; bytes where dtypes differ, for then G is bytes
    work: Work | None  # of an asynchronous collective
    event: torch.Event | None  # its end, on a device
    async_op: bool

    def wait(self, stream: torch.Stream) -> None:
        """Make ``stream`` (a device's) or this thread (asynchronous collectives) wait for the end of the all-gather."""
        if self.event is not None:
            stream.wait_event(self.event)
        if self.work is not None:
            self.work.wait()


@torch.no_grad()
def foreach_all_gather(
    fsdp_params: list[FSDPParam],
    group: ProcessGroup,
    ctx: Streams,
    async_op: bool = False,
    training_state: TrainingState = TrainingState.IDLE,
) -> AllGatherResult:
    """Allocate G, copy this rank's shards into their place in it, issue the all-gather.

    Streams: allocation, casts and copy-in on the all-gather copy-in stream, the collective on the all-gather stream.
    """
    if group.size() == 1:
        ctx.current_stream().record_event()  # torch does too; nobody waits for it
        return AllGatherResult(None, [], [], None, None, async_op)
    copy_in_stream, all_gather_stream = ctx.get_all_gather_streams(async_op, training_state)
    with ctx.device_handle.stream(copy_in_stream):
        of_params = all_gather_inputs(fsdp_params)  # each 1D, padded
        pieces = [[(t.numel(), t.dtype) for t in tensors] for tensors in of_params]
        inputs = [t for tensors in of_params for t in tensors]
        if len({t.dtype for t in inputs}) > 1:
            inputs = [t.view(torch.uint8) for t in inputs]
        split_sizes = [t.numel() for t in inputs]
        output = torch.empty(group.size() * sum(split_sizes), dtype=inputs[0].dtype, device=inputs[0].device)  # G
        own = all_gather_copy_in(inputs, output, split_sizes, group.rank())
        del inputs, of_params
    all_gather_stream.wait_stream(copy_in_stream)
    with ctx.device_handle.stream(all_gather_stream):
        work = all_gather_single(output, own, group, async_op or ctx.on_cpu)
        event = all_gather_stream.record_event()
    return AllGatherResult(output, pieces, split_sizes, work, event, async_op)


def all_gather_copy_in(
    inputs: list[torch.Tensor], output: torch.Tensor, split_sizes: list[int], rank: int
) -> torch.Tensor:
    """Copy this rank's pieces into their place in G. In place: the input of the all-gather is part of its output."""
    own = output.narrow(0, rank * sum(split_sizes), sum(split_sizes))
    with record_operation("fsdp::all_gather_copy_in"):  # in torch it is one
        torch._foreach_copy_(own.split(split_sizes), inputs)
    return own


@torch.no_grad()
def foreach_all_gather_copy_out(
    result: AllGatherResult, fsdp_params: list[FSDPParam], world_size: int, ctx: Streams
) -> None:
    """Wait for the all-gather, allocate the unsharded parameters, copy G into them. Stream: compute."""
    if result.output is None:
        _copy_without_gather(fsdp_params)
        return
    result.wait(ctx.current_stream())
    for p, pieces in zip(fsdp_params, result.pieces, strict=True):
        p.alloc_unsharded_param(pieces, world_size)
    gathered = result.output.view(world_size, -1)  # (W, sum of padded elements)
    outs = [out.view(world_size, -1) for p in fsdp_params for out in p.all_gather_outputs]  # each (W, padded elements)
    if gathered.dtype == torch.uint8:
        outs = [out.view(torch.uint8) for out in outs]
    split_with_sizes_copy(gathered, result.split_sizes, outs)


def split_with_sizes_copy(gathered: torch.Tensor, split_sizes: list[int], outs: list[torch.Tensor]) -> None:
    """Copy the columns of G (W, sum of padded elements) side by side into the parameters, each (W, its elements)."""
    with _same_version(outs):
        torch.split_with_sizes_copy(gathered, split_sizes, dim=1, out=outs)


def _copy_without_gather(fsdp_params: list[FSDPParam]) -> None:
    """One rank: the shard is the parameter."""
    for p in fsdp_params:
        inputs = p.all_gather_inputs
        p.alloc_unsharded_param([(t.numel(), t.dtype) for t in inputs], 1)
        with _same_version(p.all_gather_outputs):
            for output, data in zip(p.all_gather_outputs, inputs, strict=True):
                output.copy_(data)


def _same_version(tensors: list[torch.Tensor]) -> Any:
    """Autograd counts writes to what it saved; these write the very values it saved. Inference tensors don't count."""
    return _unsafe_preserve_version_counter(tuple(t for t in tensors if not t.is_inference()))


@dataclass(eq=False)
class ReduceScatterState:
    """Gradients of a unit on their way through the collectives that reduce them. Whoever holds this keeps I alive."""

    fsdp_params: list[FSDPParam]  # those whose gradients are in it
    division: Division
    input: torch.Tensor  # I, 1D: W * chunk, in the reduce dtype
    output: torch.Tensor | None  # O, 1D: chunk; None once it was handed out as gradients
    orig_dtype: torch.dtype  # of the gradients handed out
    work: Work | None  # on CPU, of the last collective that writes O, until it has been waited for
    event: torch.Event | None  # end of the reduce-scatter, on a device
    post_reduce_stream: torch.Stream  # where what follows the reduction runs

    def wait(self, ctx: Streams) -> None:
        """Wait until I may be reused. On CPU this hands out O, which on a device was queued behind the collective."""
        if self.event is not None:
            ctx.current_stream().wait_event(self.event)
        self.finish(ctx)

    def wait_for_work(self) -> None:
        """On CPU, wait for the last collective: there is no stream to queue on, the thread goes on when O is there."""
        if self.work is not None:
            self.work.wait()
            self.work = None  # once: gloo's reduce-scatter writes O in every wait

    def finish(self, ctx: Streams) -> torch.Event | None:
        """Wait for the last collective and hand out O as sharded gradients; once.

        Returns:
            the event of its end, on a device.
        """
        if self.output is None:
            return None
        self.wait_for_work()
        return hand_out_grads(self, ctx)


@torch.no_grad()
def foreach_reduce_scatter(
    fsdp_params: list[FSDPParam],
    unsharded_grads: list[torch.Tensor],
    group: ProcessGroup,
    ctx: Streams,
    dtypes: tuple[torch.dtype, torch.dtype],
    division: Division,
) -> ReduceScatterState:
    """Copy the gradients of whole parameters into I, free them, issue the reduce-scatter.

    Streams: I and the copy-in on the compute stream; O and the collective on the reduce-scatter stream.

    Args:
        unsharded_grads: owns the gradients; emptied after the copy-in, which frees them.
        dtypes: (reduce dtype, original dtype).
    """
    world_size, device = group.size(), unsharded_grads[0].device
    numel = world_size * sum(p.padded_sharded_param_size.numel() for p in fsdp_params)
    reduce_input = torch.empty(numel, dtype=dtypes[0], device=device)  # I
    foreach_reduce_scatter_copy_in(unsharded_grads, reduce_input, world_size)
    unsharded_grads.clear()
    stream, work = ctx.reduce_scatter_stream, None
    stream.wait_stream(ctx.current_stream())
    with ctx.device_handle.stream(stream):
        output = torch.empty(numel // world_size, dtype=dtypes[0], device=device)  # O
        div_if_needed(reduce_input, division.before)
        if world_size == 1:
            output.copy_(reduce_input)
        else:
            work = reduce_scatter_single(output, reduce_input, division.reduce_scatter_op, group, ctx.on_cpu)
        event = stream.record_event()
    return ReduceScatterState(
        fsdp_params, division, reduce_input, output, dtypes[1], work, event, post_reduce_stream=stream
    )


def foreach_reduce_scatter_copy_in(
    unsharded_grads: list[torch.Tensor], reduce_input: torch.Tensor, world_size: int
) -> None:
    """Cut each gradient into W pieces on dim 0 (zeros below the last row); piece r of all of them is row r of I."""
    if len({grad.dtype for grad in unsharded_grads}) > 1:  # from torch 2.15 on, as in its chunk_cat_mixed_dtype
        unsharded_grads[:] = [grad.to(reduce_input.dtype) for grad in unsharded_grads]
    torch._chunk_cat(unsharded_grads, dim=0, num_chunks=world_size, out=reduce_input.view(world_size, -1))


@torch.no_grad()
def hand_out_grads(state: ReduceScatterState, ctx: Streams) -> torch.Event | None:
    """Make O the sharded gradients. They are views of it, so O lives until ``zero_grad``. Stream: the last one used.

    Returns:
        the event of its end, on a device.
    """
    assert state.output is not None
    stream = state.post_reduce_stream
    with ctx.device_handle.stream(stream):
        div_if_needed(state.output, state.division.after)
        before_cast = state.output if versions.REDUCED_OUTLIVES_ITS_CAST else None
        output, state.output = to_dtype(state.output, state.orig_dtype), None
        offset = 0
        for p in state.fsdp_params:
            rows = output[offset : offset + p.sharded_size.numel()].view(p.sharded_size)  # (0 to rows, ...)
            offset += p.padded_sharded_param_size.numel()
            if p.offload_to_cpu:
                rows = grad_to_cpu(p, rows, stream)
            if p.sharded_param.grad is None:
                p.sharded_param.grad = p.to_sharded_dtensor(rows)
            else:  # gradient accumulation
                local_tensor(p.sharded_param.grad).add_(rows)
            for hook in (getattr(p.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
                hook(p.sharded_param)
        event = stream.record_event()
        del before_cast
        return event
