"""FSDP1 in miniature: when flat parameters are gathered and reduced (torch: `FullyShardedDataParallel`).

What a flat parameter is, what it buys and what it costs: [Note: the flat parameter] in `flat_param`.

[Note: streams on a CPU]  torch gathers on an unshard stream and reduces on a post-backward stream. Here a `Stream` is
the list of collectives that were issued on it and run beside the computation. Where torch's compute stream waits for a
stream, this thread waits for all collectives of the list.

[Note: the rate limiter]  In FSDP1 nothing on the GPU makes an all-gather wait for compute: a CPU that runs ahead would
gather all units at once. So whoever frees a unit leaves an event on the compute stream ("the last kernel that reads it
has run"), and whoever gathers looks first how many such events are queued. If two, it takes the oldest and blocks the
CPU until that has happened: about two gathered units exist at once, beside the root. The thread of a CPU computes
itself, so the event it records has always happened: the limiter takes its turn, and never blocks.

[Note: record_stream]  Memory that two streams use is given back when both have passed it, which the allocator finds out
when it is next asked for memory: the peak depends on timing. Here a gradient goes when somebody looks and finds its
reduction done. FSDP2 orders its streams by events and needs neither the limiter nor this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed import ProcessGroup, Work
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.utils import _apply_to_tensors
from torch.utils._pytree import tree_leaves

from fsdp_sim.mini import recording
from fsdp_sim.mini.collectives import reduce_scatter_single
from fsdp_sim.mini.recording import PendingCollective
from fsdp_sim.mini.siblings.collectives import default_group
from fsdp_sim.mini.siblings.flat_param import (
    FlatParamHandle,
    HandleTrainingState,
    ParamInfo,
    params_of_units,
)
from fsdp_sim.timeline import RECORDER, Lane, Memory, Op

MAX_NUM_INFLIGHT_ALL_GATHERS = 2  # torch: `_FreeEventQueue`, "empirically chosen"


class Stream:
    """The collectives under way on what would be a stream of a GPU, see [Note: streams on a CPU]."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[PendingCollective, Work, torch.Tensor, Callable[[], None] | None]] = deque()

    def issue(
        self,
        op: Op,
        handle: FlatParamHandle,
        whole: torch.Tensor,
        collective: Callable[..., Work],
        then: Callable[[], None] | None = None,
    ) -> int:
        """Issue a collective and queue ``then`` behind it. Keeps ``whole``, the larger of its tensors, alive.

        Returns:
            the ``seq`` of its event in the timeline.
        """
        with RECORDER.label(handle.unit):
            pending = PendingCollective(op, handle.unit, whole, handle.process_group, -1)
            work = collective(group=handle.process_group, async_op=True)
        self._under_way.append((pending.with_work(work), work, whole, then))
        return pending.seq

    def wait(self, only_what_is_done: bool = False) -> None:
        """Wait for all that was issued (torch: ``current_stream.wait_stream(self)``), or see [Note: record_stream]."""
        while self._under_way and (not only_what_is_done or self._under_way[0][1].is_completed()):
            pending, _, _, then = self._under_way.popleft()
            pending.wait()
            if then is not None:
                then()


class FlatParameterFSDP(nn.Module):
    """Shards the parameters of a module, one flat parameter per unit (torch: `FullyShardedDataParallel`).

    torch wraps every unit in a module of its own and finds the root in the first forward. Here one wrapper is the root
    and hooks the units inside. All ranks must start from the same parameters. As in torch, parameters that the strategy
    keeps after forward are gathered anew only after a backward: do not step the optimizer between the two.

    Args:
        module: the root unit; it takes the parameters that the units inside leave over.
        process_group: all ranks by default.
        sharding_strategy: FULL_SHARD frees parameters after forward (the root's not) and after backward, SHARD_GRAD_OP
            after backward, NO_SHARD never, and all-reduces. With one rank every strategy is NO_SHARD.
        auto_wrap: classes of the modules inside that are units.
        backward_prefetch: issue the next all-gather before a unit's backward (BACKWARD_PRE), after it and before its
            reduce-scatter (BACKWARD_POST), or when it is needed (None).
        forward_prefetch: issue the next all-gather before a unit's forward, in the order of the first iteration. As in
            torch this makes the next unit's views before this unit's compute, so backward reaches them after it, and a
            unit is freed and reduced one unit late.
        limit_all_gathers: see [Note: the rate limiter].

    Raises:
        ValueError: a hybrid strategy; parameters that do not go into one flat parameter, see `params_of_units`.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
        *,
        auto_wrap: Iterable[type[nn.Module]] = (),
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
    ) -> None:
        super().__init__()
        if "HYBRID" in sharding_strategy.name:
            raise ValueError(f"{sharding_strategy} is not in this miniature; use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD")
        self.module = module
        self.process_group = default_group(process_group)
        world_size = self.process_group.size()
        self.sharding_strategy = ShardingStrategy.NO_SHARD if world_size == 1 else sharding_strategy
        self.backward_prefetch, self.forward_prefetch = backward_prefetch, forward_prefetch
        self.limit_all_gathers = limit_all_gathers
        self._gradient_predivide_factor = _get_gradient_predivide_factor(world_size)
        self._gradient_postdivide_factor = world_size / self._gradient_predivide_factor
        self._unshard_stream, self._post_backward_stream = Stream(), Stream()
        self._free_event_queue: deque[Any] = deque()  # see [Note: the rate limiter]
        self._is_first_iter = True
        self._handles_pre_forward_order: list[FlatParamHandle] = []  # of the first iteration
        self._handles_post_forward_order: list[FlatParamHandle] = []  # of this one
        self._post_backward_callback_queued = False
        self._sync_gradients = True
        self._compute = recording.ComputeSegments()
        self._recorded_session, self._last_reduced = 0, -1
        classes = tuple(auto_wrap)
        units = {fqn: m for fqn, m in module.named_modules() if not fqn or isinstance(m, classes)}
        params = params_of_units(module, units)
        self._all_handles = [self._make_unit(fqn, units[fqn], infos) for fqn, infos in params.items()]
        for handle in self._all_handles:
            prefix = "" if handle.is_root else f"{handle.unit}."
            if any(fqn and fqn != handle.unit and fqn.startswith(prefix) for fqn in units):
                handle._segments = (f"{prefix}embed", f"{prefix}head")
        recording.install()

    def _make_unit(self, fqn: str, module: nn.Module, infos: list[ParamInfo]) -> FlatParamHandle:
        sharded = self.sharding_strategy is not ShardingStrategy.NO_SHARD
        handle = FlatParamHandle(module, fqn, infos, sharded, self.process_group)
        module.register_forward_pre_hook(partial(self._pre_forward, handle), prepend=True, with_kwargs=True)
        module.register_forward_hook(partial(self._post_forward, handle))
        return handle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for handle in self._all_handles:
            handle._needs_pre_forward_unshard = True
            handle._prefetched = False
        self._record_forward()  # on a GPU the unshard stream waits here for the optimizer, on the compute stream
        return self.module(*args, **kwargs)

    # Unshard and reshard

    def _unshard(self, handle: FlatParamHandle) -> None:
        if self.limit_all_gathers and len(self._free_event_queue) >= MAX_NUM_INFLIGHT_ALL_GATHERS:
            self._free_event_queue.popleft().synchronize()
        if all_gather := handle.unshard():
            handle._gathered = self._unshard_stream.issue(Op.ALL_GATHER, handle, handle._full_param_padded, all_gather)

    def _reshard(self, handle: FlatParamHandle, free_unsharded_flat_param: bool) -> None:
        handle.reshard(free_unsharded_flat_param)
        if self.limit_all_gathers and free_unsharded_flat_param:
            free_event = torch.get_device_module(handle.flat_param.device).Event()
            free_event.record()
            self._free_event_queue.append(free_event)
        handle._prefetched = False

    def _prefetch_handle(self, current: FlatParamHandle, emulated: HandleTrainingState) -> None:
        """Issue the next unit's all-gather, if this is the place for it."""
        handle = self._get_handle_to_prefetch(current)
        if handle is not None and not handle._prefetched:
            before, handle._training_state = handle._training_state, emulated
            self._unshard(handle)
            handle._training_state, handle._prefetched = before, True

    def _get_handle_to_prefetch(self, current: FlatParamHandle) -> FlatParamHandle | None:
        """In forward the unit that followed this one in the first iteration, in backward the one before this one."""
        state, order = current._training_state, self._handles_pre_forward_order
        if state is HandleTrainingState.FORWARD and self.forward_prefetch and current in order[:-1]:
            target = order[order.index(current) + 1]
            return target if target._needs_pre_forward_unshard else None
        if self.backward_prefetch and self.backward_prefetch.name == state.name and current._post_forward_index:
            target = self._handles_post_forward_order[current._post_forward_index - 1]
            return target if target._needs_pre_backward_unshard else None
        return None

    # Forward

    def _pre_forward(self, handle: FlatParamHandle, module: nn.Module, args: Any, kwargs: Any) -> None:
        if handle._training_state is HandleTrainingState.BACKWARD_PRE:
            return  # activation checkpointing recomputes inside backward
        self._compute.close()
        if self._is_first_iter and handle not in self._handles_pre_forward_order:
            self._handles_pre_forward_order.append(handle)
        handle._training_state = HandleTrainingState.FORWARD
        if not handle._prefetched:
            self._unshard(handle)
        handle._needs_pre_forward_unshard = False
        self._unshard_stream.wait()
        self._prefetch_handle(handle, HandleTrainingState.FORWARD)
        if torch.is_grad_enabled() and handle._post_backward_hook is None:
            self._register_post_backward_hook(handle, (args, kwargs))
        self._compute.open(Op.FWD, handle._segments[0], handle._gathered)

    def _post_forward(self, handle: FlatParamHandle, module: nn.Module, args: Any, output: Any) -> Any:
        if handle._training_state is HandleTrainingState.BACKWARD_PRE:
            return output
        self._compute.close_unit(Op.FWD, handle._segments[1], handle._gathered)
        if not handle._post_forward_index:
            handle._post_forward_index = len(self._handles_post_forward_order)
        self._handles_post_forward_order.append(handle)
        self._reshard(handle, self.sharding_strategy is ShardingStrategy.FULL_SHARD and not handle.is_root)
        if torch.is_grad_enabled():
            output = self._register_pre_backward_hooks(handle, output)
        handle._training_state = HandleTrainingState.IDLE
        self._compute.unit_done()
        return output

    def _register_pre_backward_hooks(self, handle: FlatParamHandle, output: Any) -> Any:
        self._post_backward_callback_queued = False
        handle._needs_pre_backward_unshard = handle._ran_pre_backward_hook = False

        def register(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._pre_backward_hook, handle))
                handle._needs_pre_backward_unshard = True
            return tensor

        return _apply_to_tensors(register, output)

    def _register_post_backward_hook(self, handle: FlatParamHandle, inputs: Any) -> None:
        """Where the flat parameter's gradient is complete; if it is frozen, where the gradients of the inputs are."""
        hook = partial(self._post_backward_hook, handle)
        if handle.flat_param.requires_grad:
            handle._post_backward_hook = handle.flat_param.register_post_accumulate_grad_hook(hook)
        elif tensors := [t for t in tree_leaves(inputs) if isinstance(t, torch.Tensor) and t.requires_grad]:
            handle._post_backward_hook = register_multi_grad_hook(tensors, hook)

    # Backward

    def _pre_backward_hook(self, handle: FlatParamHandle, grad: torch.Tensor) -> None:
        if handle._ran_pre_backward_hook:
            return  # a unit may have several outputs
        if not self._post_backward_callback_queued:
            self._post_backward_callback_queued = True
            recording.backward_begins()
            Variable._execution_engine.queue_callback(self._post_backward_final_callback)
        self._compute.close()
        handle._training_state = HandleTrainingState.BACKWARD_PRE
        if handle._needs_pre_backward_unshard:
            if not handle._prefetched:
                self._unshard(handle)
            self._unshard_stream.wait()
        handle._needs_pre_backward_unshard = False
        self._prefetch_handle(handle, HandleTrainingState.BACKWARD_PRE)
        handle.prepare_gradient_for_backward()
        handle._ran_pre_backward_hook = True
        self._compute.open(Op.BWD, handle._segments[1], handle._gathered)

    @torch.no_grad()
    def _post_backward_hook(self, handle: FlatParamHandle, *_: Any) -> None:
        """The unit's backward is done: free the parameters, reduce the gradient."""
        self._compute.close_unit(Op.BWD, handle._segments[0], handle._gathered)
        handle._training_state = HandleTrainingState.BACKWARD_POST
        self._reshard(handle, self._should_free_in_backward())
        self._prefetch_handle(handle, HandleTrainingState.BACKWARD_PRE)
        grad = handle.flat_param.grad
        if handle.flat_param.requires_grad and grad is not None:
            if handle._grad_is_new:
                recording.allocated_storage(Memory.UNSHARDED_GRAD, handle.unit, grad, Lane.COMPUTE)
            handle._holds_unsharded_grad = not self._sync_gradients
            if self._sync_gradients:
                self._reduce_grad(handle, grad)
        self._compute.unit_done()

    def _should_free_in_backward(self) -> bool:
        """Under no_sync SHARD_GRAD_OP keeps the parameters for the next forward too."""
        if self._sync_gradients:
            return self.sharding_strategy is not ShardingStrategy.NO_SHARD
        return self.sharding_strategy is ShardingStrategy.FULL_SHARD

    def _reduce_grad(self, handle: FlatParamHandle, grad: torch.Tensor) -> None:
        """Issue the sum over the ranks of ``grad`` (1-D, sum(numels)); it is divided before and after."""
        self._post_backward_stream.wait(only_what_is_done=True)
        op, whole, reduced, collective = Op.ALL_REDUCE, grad, grad, partial(dist.all_reduce, grad)
        if handle.uses_sharded_strategy:
            handle.flat_param.grad = None
            op, reduced = Op.REDUCE_SCATTER, torch.empty_like(handle._local_shard)  # 1-D, chunk
            if numel_to_pad := handle.world_size * reduced.numel() - grad.numel():
                whole = F.pad(grad, [0, numel_to_pad])  # 1-D, W * chunk
                recording.allocated_storage(Memory.RS_INPUT, handle.unit, whole, Lane.COMPUTE)
            recording.allocated_storage(Memory.RS_OUTPUT, handle.unit, reduced, Lane.REDUCE_SCATTER)
            collective = partial(reduce_scatter_single, reduced, whole, dist.ReduceOp.SUM)
        whole.div_(self._gradient_predivide_factor)

        def finish() -> None:
            reduced.div_(self._gradient_postdivide_factor)
            if handle.uses_sharded_strategy:
                handle.accumulate_sharded_grad(reduced)

        self._last_reduced = self._post_backward_stream.issue(op, handle, whole, collective, finish)

    @torch.no_grad()
    def _post_backward_final_callback(self) -> None:
        """The end of backward: wait for the reductions, free what is left, hand the gradients to the optimizer."""
        self._compute.close()
        self._post_backward_stream.wait()
        self._unshard_stream.wait()  # what was prefetched in vain: gloo must not write to memory that is freed below
        self._is_first_iter = False
        self._handles_post_forward_order.clear()
        for handle in self._all_handles:
            if self._should_free_in_backward() and not handle.needs_unshard():
                self._reshard(handle, True)  # prefetched in vain, or its outputs were not used
            if handle._post_backward_hook is not None:
                handle._post_backward_hook.remove()
            if self._sync_gradients:
                handle.prepare_gradient_for_optim()
            handle._needs_pre_backward_unshard = handle._prefetched = handle._ran_pre_backward_hook = False
            handle._post_forward_index = handle._post_backward_hook = None
            handle._training_state = HandleTrainingState.IDLE
        self._post_backward_callback_queued = False
        recording.backward_ended(self._last_reduced)

    # What the training script calls

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside leaves the gradients of whole parameters on each rank, without communication."""
        self._sync_gradients = False
        try:
            yield
        finally:
            self._sync_gradients = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients by their norm over all ranks (`torch.nn.utils.clip_grad_norm_` would see chunks).

        Returns:
            the norm before.
        """
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None], norm_type)
        if self.sharding_strategy is not ShardingStrategy.NO_SHARD:
            if norm_type == torch.inf:
                dist.all_reduce(norm, dist.ReduceOp.MAX, group=self.process_group)
            else:
                norm = norm**norm_type
                dist.all_reduce(norm, group=self.process_group)
                norm = norm ** (1 / norm_type)
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Whole parameters, and buffers, under the names in the module that was wrapped. Called on all ranks.

        The ordinary `state_dict` holds chunks. Source: `torch.distributed.fsdp.StateDictType.FULL_STATE_DICT`.
        """
        state = {name: t for name, t in self.module.state_dict().items() if not name.endswith("_flat_param")}  # buffers
        for handle in self._all_handles:
            state |= handle.gather_unflattened(handle._local_shard)
        return state

    def full_gradients(self) -> dict[str, torch.Tensor]:
        """Whole gradients under the original names, without those that are None. Called on all ranks."""
        grads: dict[str, torch.Tensor] = {}
        for handle in self._all_handles:
            if handle.flat_param.grad is not None:
                grads |= handle.gather_unflattened(handle.flat_param.grad)
        return grads

    def _record_forward(self) -> None:
        if RECORDER.on and self._recorded_session != RECORDER.session:
            self._recorded_session = RECORDER.session
            for handle in self._all_handles:
                recording.allocated(Memory.SHARDED, handle.unit, handle._local_shard.nbytes, Lane.COMPUTE)
        recording.forward_begins(())


def _get_gradient_predivide_factor(world_size: int) -> float:
    """2^k near sqrt(W): half of the division before the sum and half after, so that neither over- nor underflows."""
    factor = 1
    while world_size % factor == 0 and world_size / factor > factor:
        factor *= 2
    return float(factor)
