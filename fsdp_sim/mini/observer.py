"""What is recorded of the mini, attached from outside: the timeline of a training that knows nothing of timelines.

While `fsdp_sim.timeline.RECORDER` records, the functions in `OBSERVED` are replaced by the methods of `Observer` that
have their names: each calls the original and writes down what happened, to which unit, and what that waited for. When
the recording stops the originals are back, and not a line of this file runs. The mini imports nothing of it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.distributed import ProcessGroup

from fsdp_sim.mini import accumulation, collectives, recording
from fsdp_sim.mini.collectives import AllGatherResult, ReduceScatterState
from fsdp_sim.mini.comm_context import FSDPCommContext
from fsdp_sim.mini.group import FSDPParamGroup
from fsdp_sim.mini.param import FSDPParam
from fsdp_sim.mini.recording import ComputeSegments, PendingCollective
from fsdp_sim.mini.state import FSDPState, state_of
from fsdp_sim.states import ShardedState, TrainingState
from fsdp_sim.timeline import RECORDER, Lane, Memory, Op

Original = Callable[..., Any]
OBSERVED: dict[Any, tuple[str, ...]] = {
    FSDPState: (
        "_root_pre_forward", "_unshard_in_forward", "_complete_forward", "_queue_final_callback",
        "_unshard_in_backward", "_root_post_backward_final_callback", "_reset_iter_state",
    ),
    FSDPParamGroup: (
        "unshard", "wait_for_unshard", "post_backward", "_to_unsharded", "_to_sharded", "_to_sharded_post_forward",
    ),
    FSDPCommContext: ("release_all_gather_state", "wait_for_reduce_scatters", "wait_for_all_reduce_scatters"),
    ReduceScatterState: ("wait",),
    collectives: (
        "foreach_all_gather", "all_gather_copy_in", "all_gather_single", "split_with_sizes_copy",
        "_copy_without_gather", "foreach_reduce_scatter", "foreach_reduce_scatter_copy_in", "reduce_scatter_single",
        "all_reduce_single",
    ),
    accumulation: ("keep_in_reduce_dtype",),
}  # fmt: skip


@contextmanager
def attached() -> Iterator[None]:
    """Record the mini while the block runs."""
    observer = Observer()
    originals = {(owner, name): getattr(owner, name) for owner, names in OBSERVED.items() for name in names}
    for (owner, name), original in originals.items():
        setattr(owner, name, observer.instead_of(original, only_for_a_unit=isinstance(owner, ModuleType)))
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)
        observer.detach()


def segments(group: FSDPParamGroup, module_fqns: list[str]) -> tuple[str, str]:
    """Names of a unit's first and last segment of compute, see `recording`."""
    own = group.unit.split(", ") if group._module_fqn else [""]
    prefixes = tuple(f"{fqn}." if fqn else "" for fqn in own)
    if not any(name not in own and name.startswith(prefixes) for name in module_fqns):
        return group.unit, group.unit
    if group._module_fqn:
        return f"{group._module_fqn}.embed", f"{group._module_fqn}.head"
    first, last = (f"root.{word}" if word in module_fqns else word for word in ("embed", "head"))  # a unit is called so
    return first, last


class Observer:
    """One recording. ``seq`` numbers its events; -1 is none."""

    def __init__(self) -> None:
        self._computes: Any = weakref.WeakKeyDictionary()  # by context: ComputeSegments
        self._segments: Any = weakref.WeakKeyDictionary()  # by group: names of its first and last segment of compute
        self._copy_out: Any = weakref.WeakKeyDictionary()  # by group and by AllGatherResult: seq of the last copy-out
        self._copied_out: Any = weakref.WeakKeyDictionary()  # by context: seq that its all-gather streams wait for
        self._reduction: Any = weakref.WeakKeyDictionary()  # by ReduceScatterState: unit, seq of its last collective
        self._whole_grad: Any = weakref.WeakKeyDictionary()  # by FSDPParam: the storage of its gradient, weakly
        self._grad_hooks: Any = weakref.WeakKeyDictionary()  # by FSDPParam
        self._optimizer_hooks: list[Any] = []
        self._group: Any = None  # the FSDPParamGroup whose copies and collectives are being issued
        self._reducing: Any = None  # its ReduceScatterState
        self._copy_in = self._gathered = self._waited_for = self._last_reduced = -1  # seqs

    def instead_of(self, original: Original, only_for_a_unit: bool) -> Original:
        """The method that stands in for a function, which it gets first; or not, where no unit is known."""
        observe = getattr(self, original.__name__)

        @functools.wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            if only_for_a_unit and self._group is None:
                return original(*args, **kwargs)
            return observe(original, *args, **kwargs)

        return observed

    def detach(self) -> None:
        recording.uninstall(self._optimizer_hooks)
        for handle in self._grad_hooks.values():
            handle.remove()

    @contextmanager
    def _issuing(self, group: FSDPParamGroup) -> Iterator[None]:
        before, self._group = self._group, group
        try:
            yield
        finally:
            self._group = before

    # The hooks: steps, phases, compute

    def _compute(self, ctx: FSDPCommContext) -> ComputeSegments:
        return self._computes.setdefault(ctx, ComputeSegments())

    def _segment(self, group: FSDPParamGroup, which: int) -> tuple[str, int]:
        """The name of a segment of compute, and the copy-out that it waits for."""
        name = self._segments[group][which] if group in self._segments else group.unit
        return name, self._copy_out.get(group, -1)

    def _root_pre_forward(self, original: Original, state: FSDPState, *args: Any) -> Any:
        begins = state._state_ctx.iter_forward_root is None
        inputs = original(state, *args)
        if begins:
            self._name_segments(state)
            self._copied_out[state._comm_ctx] = -1
            recording.forward_begins(state._groups())
        return inputs

    def _name_segments(self, state: FSDPState) -> None:
        """In the first forward or backward of a root: name its segments of compute, and watch the optimizers."""
        self._optimizer_hooks += recording.install()
        groups = state._groups()
        if not all(group in self._segments for group in groups):
            root = state._state_ctx.all_states[0]._modules[0]
            names = [name for name, module in root.named_modules() if state_of(module) is not None]
            self._segments.update((group, segments(group, names)) for group in groups)

    def _unshard_in_forward(self, original: Original, state: FSDPState, *args: Any) -> Any:
        compute, group = self._compute(state._comm_ctx), state._fsdp_param_group
        compute.close()
        inputs = original(state, *args)
        if group is not None:
            compute.open(Op.FWD, *self._segment(group, 0))
        return inputs

    def _complete_forward(self, original: Original, state: FSDPState, *args: Any) -> Any:
        compute, group = self._compute(state._comm_ctx), state._fsdp_param_group
        if group is not None:
            compute.close_unit(Op.FWD, *self._segment(group, -1))
        output = original(state, *args)
        compute.unit_done()
        return output

    def _queue_final_callback(self, original: Original, state: FSDPState) -> None:
        if not state._state_ctx.post_backward_final_callback_queued:
            self._name_segments(state)
            recording.backward_begins()
        original(state)

    def _unshard_in_backward(self, original: Original, state: FSDPState) -> None:
        compute, group = self._compute(state._comm_ctx), state._fsdp_param_group
        if group is None or group._training_state is TrainingState.PRE_BACKWARD:  # another output came first
            original(state)
            return
        compute.close()
        original(state)
        compute.open(Op.BWD, *self._segment(group, -1))

    def post_backward(self, original: Original, group: FSDPParamGroup) -> None:
        compute, begun = self._compute(group.comm_ctx), group._training_state is TrainingState.PRE_BACKWARD
        if begun:
            compute.close_unit(Op.BWD, *self._segment(group, 0))
        with self._issuing(group):
            original(group)
        self._reducing = None
        if begun:
            compute.unit_done()

    def _root_post_backward_final_callback(self, original: Original, state: FSDPState) -> None:
        self._last_reduced = -1
        original(state)
        self._compute(state._comm_ctx).close()
        recording.backward_ended(self._last_reduced)

    def _reset_iter_state(self, original: Original, state: FSDPState) -> None:
        self._compute(state._comm_ctx).close()
        original(state)

    # All-gather

    def unshard(self, original: Original, group: FSDPParamGroup, *args: Any, **kwargs: Any) -> None:
        with self._issuing(group):
            original(group, *args, **kwargs)

    def foreach_all_gather(self, original: Original, *args: Any) -> AllGatherResult:
        result: AllGatherResult = original(*args)
        if result.output is not None:
            n_bytes = result.output.nbytes
            recording.freed_with(result, Memory.AG_OUTPUT, self._group.unit, n_bytes, Lane.AG_COPY_IN)
        return result

    def all_gather_copy_in(self, original: Original, inputs: Any, output: torch.Tensor, *args: Any) -> torch.Tensor:
        recording.allocated(Memory.AG_OUTPUT, self._group.unit, output.nbytes, Lane.AG_COPY_IN)
        waits_on = self._copied_out.get(self._group.comm_ctx, -1)
        with RECORDER.span(Op.AG_COPY_IN, self._group.unit, waits_on=(waits_on,)) as self._copy_in:
            return original(inputs, output, *args)

    def all_gather_single(
        self, original: Original, output: torch.Tensor, own: torch.Tensor, group: ProcessGroup, async_op: bool
    ) -> PendingCollective:
        pending = PendingCollective(Op.ALL_GATHER, self._group.unit, output, group, self._copy_in)
        return pending.issue(original, output, own, group, async_op)

    def wait_for_unshard(self, original: Original, group: FSDPParamGroup) -> None:
        if group._all_gather_result is None:
            return
        ctx, result = group.comm_ctx, weakref.ref(group._all_gather_result)
        self._gathered = getattr(group._all_gather_result.work, "seq", -1)
        with self._issuing(group):
            original(group)
        kept = ctx.all_gather_state is not None and ctx.all_gather_state.result is result()
        if kept:  # whoever releases it has the streams wait
            self._copy_out[result()] = self._copy_out.get(group, -1)
        else:
            self._copied_out[ctx] = self._copy_out.get(group, -1)

    def release_all_gather_state(self, original: Original, ctx: FSDPCommContext) -> Any:
        state = original(ctx)
        if state is not None:
            self._copied_out[ctx] = self._copy_out.get(state.result, -1)
        return state

    def split_with_sizes_copy(self, original: Original, *args: Any) -> None:
        self._allocated_unsharded()
        with RECORDER.span(Op.AG_COPY_OUT, self._group.unit, waits_on=(self._gathered,)) as seq:
            original(*args)
        self._copy_out[self._group] = seq

    def _copy_without_gather(self, original: Original, fsdp_params: list[FSDPParam]) -> None:
        with RECORDER.span(Op.AG_COPY_OUT, self._group.unit) as seq:
            original(fsdp_params)
            self._allocated_unsharded()
        self._copy_out[self._group] = seq

    def _allocated_unsharded(self) -> None:
        for p in self._group.fsdp_params:
            recording.allocated(Memory.UNSHARDED, self._group.unit, p.unsharded_bytes, Lane.COMPUTE)

    # Whole parameters and their gradients

    def _to_sharded(self, original: Original, group: FSDPParamGroup) -> None:
        whole = [p for p in group.fsdp_params if p.sharded_state is ShardedState.UNSHARDED]
        original(group)
        for p in whole:
            if p.sharded_state is ShardedState.SHARDED_POST_FORWARD:
                recording.allocated_storage(Memory.SHARDED, group.unit, p.local_data, Lane.COMPUTE)
            if p.sharded_state is not ShardedState.UNSHARDED:
                recording.freed(Memory.UNSHARDED, group.unit, p.unsharded_bytes, Lane.COMPUTE)

    _to_sharded_post_forward = _to_sharded

    def _to_unsharded(self, original: Original, group: FSDPParamGroup) -> None:
        original(group)
        for p in group.fsdp_params:
            if p.unsharded_param.requires_grad and p not in self._grad_hooks:
                written = functools.partial(self._grad_written, p, group)
                self._grad_hooks[p] = p.unsharded_param.register_post_accumulate_grad_hook(written)

    def _grad_written(self, fsdp_param: FSDPParam, group: FSDPParamGroup, param: torch.Tensor) -> None:
        """Autograd has written a whole gradient, in the middle of the unit's backward."""
        if param.grad is not None:
            self._grad_kept(fsdp_param, param.grad, group.unit)

    def keep_in_reduce_dtype(self, original: Original, fsdp_param: FSDPParam) -> None:
        before = fsdp_param.unsharded_accumulated_grad
        _narrow = fsdp_param.unsharded_param.grad if fsdp_param.was_gathered else None  # goes after the wider one came
        original(fsdp_param)
        kept = fsdp_param.unsharded_accumulated_grad
        if kept is not None and kept is not before:
            self._grad_kept(fsdp_param, kept, self._group.unit)

    def _grad_kept(self, fsdp_param: FSDPParam, grad: torch.Tensor, unit: str) -> None:
        """Record the memory of a whole gradient, once: micro-batches accumulate in place."""
        before = self._whole_grad.get(fsdp_param)
        if before is None or before() is not grad.untyped_storage():
            self._whole_grad[fsdp_param] = weakref.ref(grad.untyped_storage())
            recording.allocated_storage(Memory.UNSHARDED_GRAD, unit, grad, Lane.COMPUTE)

    # Reduction

    def wait_for_reduce_scatters(self, original: Original, *args: Any) -> None:
        self._waited_for = -1
        original(*args)

    def wait_for_all_reduce_scatters(self, original: Original, ctx: FSDPCommContext) -> None:
        self._last_reduced = max((self._reduced(state) for state in ctx.reduce_scatter_states), default=-1)
        original(ctx)

    def wait(self, original: Original, state: ReduceScatterState, ctx: FSDPCommContext) -> None:
        original(state, ctx)
        if state in self._reduction:
            unit, self._waited_for = self._reduction[state]
            recording.freed(Memory.RS_INPUT, unit, state.input.nbytes, Lane.COMPUTE)

    def _reduced(self, state: ReduceScatterState) -> int:
        return self._reduction.get(state, ("", -1))[1]

    def foreach_reduce_scatter_copy_in(
        self, original: Original, grads: list[torch.Tensor], reduce_input: torch.Tensor, *args: Any
    ) -> None:
        recording.allocated(Memory.RS_INPUT, self._group.unit, reduce_input.nbytes, Lane.COMPUTE)
        with RECORDER.span(Op.RS_COPY_IN, self._group.unit, waits_on=(self._waited_for,)) as self._copy_in:
            original(grads, reduce_input, *args)

    def reduce_scatter_single(
        self, original: Original, output: torch.Tensor, whole: torch.Tensor, op: Any, group: ProcessGroup, *args: Any
    ) -> PendingCollective:
        recording.allocated_storage(Memory.RS_OUTPUT, self._group.unit, output, Lane.REDUCE_SCATTER)
        pending = PendingCollective(Op.REDUCE_SCATTER, self._group.unit, whole, group, self._copy_in)
        return pending.issue(original, output, whole, op, group, *args)

    def foreach_reduce_scatter(self, original: Original, *args: Any) -> ReduceScatterState:
        self._reducing = state = original(*args)
        if state.work is None:  # one rank
            recording.allocated_storage(Memory.RS_OUTPUT, self._group.unit, state.output, Lane.REDUCE_SCATTER)
        self._reduction[state] = self._group.unit, getattr(state.work, "seq", -1)
        return state

    def all_reduce_single(
        self, original: Original, tensor: torch.Tensor, op: Any, group: ProcessGroup, *args: Any
    ) -> PendingCollective:
        scattered = self._reduced(self._reducing)
        pending = PendingCollective(Op.ALL_REDUCE, self._group.unit, tensor, group, scattered)
        self._reduction[self._reducing] = self._group.unit, pending.seq
        return pending.issue(original, tensor, op, group, *args)
