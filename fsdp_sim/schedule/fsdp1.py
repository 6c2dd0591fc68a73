"""`build_fsdp1`: the program of ``FullyShardedDataParallel``.

Where FSDP2 orders gathers behind compute with events, FSDP1 orders almost nothing on the GPU: its all-gathers go to the
unshard stream, its reduce-scatters to the post-backward stream, and each runs as soon as the wire is free. What keeps
the gathers from running away with the memory is the CPU, which the rate limiter blocks until memory has been freed.

The hooks are those of torch 2.13's ``torch.distributed.fsdp._runtime_utils``, in its words. Forward hangs hooks on the
tensors it makes; backward goes through the segments in reverse, runs the hooks of what a segment has made, computes.

[Note: when a post-backward hook runs]  It is a hook of the flat parameter's gradient, which autograd concatenates once
it has the gradients of all parameters of the unit. That is an operation of autograd's like others, and of those that
could run next it takes the one whose forward ran last. The forward of this one is the cut of the flat parameter into
views, when it was gathered: right before the unit's own forward as a rule, but before the *previous* unit's forward if
it was prefetched. Then the post-backward hook runs only after the backward of the previous unit.

[Note: adapters]  Frozen and trained parameters of one flat parameter would all get a gradient. So whoever trains
adapters makes units of them (peft's ``fsdp_auto_wrap_policy``, which Hugging Face's Trainer takes): torch has one for
each matrix, inside its block's, here the adapters of a block are one flat parameter beside that of its frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_sim.schedule.checkpointing import checkpoints
from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.fsdp1_context import AR, B, C, FSDP1Context, P, U
from fsdp_sim.schedule.fsdp1_handle import FlatParamHandle
from fsdp_sim.schedule.lines import NOT_RECORDED
from fsdp_sim.schedule.optimizer import optimizer_step
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.tree import UnitNode, in_order_of_modules, tree_of
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Op, Phase

Hooks = list[Callable[[], None]]


def build_fsdp1(units: Sequence[Unit], plan: Plan, world_size: int, steps: int = 1) -> Program:
    """The program torch's ``FullyShardedDataParallel`` issues, each unit wrapped, with ``use_orig_params`` if need be.

    Frozen and trained parameters in one unit need ``use_orig_params``. Of these all get a gradient, for they share one
    flat parameter; not beside adapters ([Note: adapters]). (With ``cpu_offload`` torch forgets gradients of earlier
    micro-batches that it has reduced: use ``requires_gradient_sync="last"``.)

    Raises:
        ValueError: a unit has parameters of several dtypes; prefetching is not in FSDP1's words; the strategy does not
            fit ``shard_size``; gradients would never be reduced.
    """
    _validate(units, plan, world_size)
    trainer = _Trainer(units, plan, world_size)
    for step in range(steps):
        trainer.train_step(step)
    return Program(tuple(units), plan, world_size, tuple(trainer.cpu.instructions))


def _validate(units: Sequence[Unit], plan: Plan, world_size: int) -> None:
    for unit in units:
        dtypes = sorted({p.dtype for p in unit.params})
        if len(dtypes) > 1:
            one = plan.param_dtype if plan.param_dtype in dtypes else dtypes[0]
            raise ValueError(
                f"unit {unit.name} has parameters of dtypes {', '.join(dtypes)}, and FSDP1 makes one flat parameter of "
                f"a unit, which has one dtype; store all in one (Model.dtype={one!r}), or take api='fsdp2'"
            )
    if plan.requires_gradient_sync is False:
        raise ValueError(
            "Plan.requires_gradient_sync is False, so no gradient would ever be reduced; with api='fsdp1' it is True "
            "or 'last'"
        )
    if plan.shard_size == 1 < world_size:
        raise ValueError(
            "Plan.shard_size is 1: torch then trains each rank for itself and reduces nothing between them; use "
            "sharding_strategy='NO_SHARD' and leave shard_size None"
        )


class _Trainer:
    """The training loop, and what torch's ``_FSDPState`` does around each unit's forward and backward."""

    def __init__(self, units: Sequence[Unit], plan: Plan, world_size: int) -> None:
        self.cpu, self.plan, self.units, self.root = Cpu(), plan, units, tree_of(units)
        shard_size = plan.shard_size or world_size
        self.context = FSDP1Context(
            plan,
            self.cpu,
            "NO_SHARD" if shard_size == 1 else plan.sharding_strategy,
            shard_size,
            world_size // shard_size,
            use_orig_params=any(
                len({p.requires_grad for p in part.params}) > 1 for u in units for part in self.parts_of(u)
            ),
        )
        self.handles = {
            u.name: [FlatParamHandle(part, self.context, inside=n > 0) for n, part in enumerate(self.parts_of(u))]
            for u in units
        }
        modules = in_order_of_modules(list(self.root))
        self.order = [handle for node in modules for handle in self.handles[node.unit.name]]
        self.block_of = checkpoints(units, plan)
        self.prefetches = plan.backward_prefetch or "BACKWARD_PRE"
        self.pre_forward_order: list[FlatParamHandle] = []
        self.post_forward_order: list[FlatParamHandle] = []

    def parts_of(self, unit: Unit) -> list[Unit]:
        """The unit itself, or where there are adapters what is frozen and what is trained. See [Note: adapters]."""
        params = [unit.params]
        if self.plan.lora_rank is not None:
            params = [tuple(p for p in unit.params if p.requires_grad is trained) for trained in (False, True)]
        return [replace(unit, params=part) for part in params if part]

    def train_step(self, step: int) -> None:
        cpu, last = self.cpu, self.plan.grad_accum - 1
        cpu.step = step
        for micro_batch in range(self.plan.grad_accum):
            cpu.micro_batch = micro_batch
            self.context.sync_gradients = self.plan.requires_gradient_sync is True or micro_batch == last
            self.forward()
            self.backward()
        cpu.phase = Phase.OPTIMIZER
        optimizer_step(cpu, self.units, self.plan, self.context.shard_size * self.context.replicas)
        for handle in self.order:
            handle.free_grads()

    # Forward. `seq` numbers the operations of autograd; `hooks` are those of the tensor at hand, None if it has no
    # gradient

    def forward(self) -> None:
        self.cpu.phase = Phase.FORWARD
        self.seq = 0
        self.segments: list[tuple[int, str, list[FlatParamHandle], Hooks]] = []
        self.views: dict[FlatParamHandle, int] = {}
        self.hooks: Hooks | None = None
        for handle in self.order:
            handle.needs_pre_forward_unshard = bool(self.plan.forward_prefetch)
            handle.prefetched = False
        self.cpu.wait_stream(U, C)
        self.cpu.wait_stream(P, C)
        self.forward_of(self.root)

    def forward_of(self, node: UnitNode) -> None:
        unit, handles = node.unit, self.handles[node.unit.name]
        for handle in handles:
            self.pre_forward(handle)
        for segment in unit.before_children():
            self.segment(segment, handles)
        for child in node.children:
            self.forward_of(child)
        for segment in unit.after_children():
            self.segment(segment, handles)
        for handle in reversed(handles):
            self.post_forward(node, handle)
        if not handles and node is self.root and self.hooks is not None:
            self.hooks.append(lambda: self.pre_backward(None))

    def segment(self, segment: str, handles: list[FlatParamHandle]) -> None:
        self.cpu.op(Op.FWD, segment)
        self.seq += 1
        if self.hooks is not None or any(h.requires_grad and segment in h.segments for h in handles):
            self.hooks = []
            self.segments.append((self.seq, segment, handles, self.hooks))

    def pre_forward(self, handle: FlatParamHandle) -> None:
        if handle.pre_forward_index is None:
            handle.pre_forward_index = len(self.pre_forward_order)
            self.pre_forward_order.append(handle)
        if not handle.prefetched:
            self.unshard_in_forward(handle)
        handle.needs_pre_forward_unshard = False
        self.cpu.wait_stream(C, U)
        following = self.pre_forward_order[handle.pre_forward_index + 1 : handle.pre_forward_index + 2]
        for other in following:
            if self.plan.forward_prefetch and other.needs_pre_forward_unshard and not other.prefetched:
                self.unshard_in_forward(other)
                other.prefetched = True
        if not handle.requires_grad and self.hooks is not None:
            self.hooks.append(lambda: self.post_backward_reshard(handle))

    def unshard_in_forward(self, handle: FlatParamHandle) -> None:
        handle.unshard()
        self.seq += 1
        self.views[handle] = self.seq

    def post_forward(self, node: UnitNode, handle: FlatParamHandle) -> None:
        handle.post_forward_index = len(self.post_forward_order)
        self.post_forward_order.append(handle)
        free = self.context.reshard_after_forward and node is not self.root
        handle.reshard(free=free, in_forward=True)
        handle.needs_pre_backward_unshard = self.hooks is not None
        if self.hooks is not None and not handle.inside:
            self.hooks.append(lambda: self.pre_backward(handle))

    # Backward

    def backward(self) -> None:
        self.cpu.phase = Phase.BACKWARD
        self.ready: list[tuple[int, FlatParamHandle]] = []  # flat gradients that autograd could concatenate
        recomputed = set()
        for seq, segment, handles, hooks in reversed(self.segments):
            if self.ready:
                self.concatenate(after=seq)
            for hook in hooks:
                hook()
            for handle in handles:
                if handle.inside and handle.needs_pre_backward_unshard:
                    self.pre_backward(handle)
            block = self.block_of.get(segment, ())
            if block and block not in recomputed:
                recomputed.add(block)
                for again in block:
                    self.cpu.op(Op.RECOMPUTE, again)
            for handle in handles:
                handle.alloc_grads(segment)
            self.cpu.op(Op.BWD, segment)
            for handle in handles:
                if handle.requires_grad and segment == handle.first_segment:
                    self.ready.append((self.views[handle], handle))
        self.concatenate(after=0)
        self.final_callback()

    def concatenate(self, after: int) -> None:
        """Run what autograd prefers to the operation with number ``after``."""
        for seq, handle in sorted(self.ready, key=lambda ready: -ready[0]):
            if seq > after:
                self.ready.remove((seq, handle))
                handle.accumulate_grad()
                self.post_backward(handle)

    def pre_backward(self, handle: FlatParamHandle | None) -> None:
        self.cpu.hook("pre_backward", handle.name if handle else "")
        if handle is None:
            return
        if not handle.prefetched:
            handle.unshard()
        self.cpu.wait_stream(C, U)
        handle.needs_pre_backward_unshard = False
        if self.prefetches == "BACKWARD_PRE":
            self.prefetch_backward(handle)

    def post_backward(self, handle: FlatParamHandle) -> None:
        self.cpu.hook("post_backward", handle.name)
        self.post_backward_reshard(handle)
        if self.context.sync_gradients:
            handle.reduce_grad()

    def post_backward_reshard(self, handle: FlatParamHandle) -> None:
        handle.reshard(free=self.frees_in_backward)
        if self.prefetches == "BACKWARD_POST":
            self.prefetch_backward(handle)

    @property
    def frees_in_backward(self) -> bool:
        """Without sync only where parameters are not kept after forward either."""
        return self.context.sharded and (self.context.sync_gradients or self.context.reshard_after_forward)

    def prefetch_backward(self, handle: FlatParamHandle) -> None:
        """Gather for the unit that ended its forward before this one."""
        if not handle.post_forward_index:  # the first, or not run
            return
        other = self.post_forward_order[handle.post_forward_index - 1]
        if other.needs_pre_backward_unshard and not other.prefetched:
            other.unshard()
            other.prefetched = True

    def final_callback(self) -> None:
        """Compute waits for the reductions, and what backward did not reach is resharded."""
        cpu, context = self.cpu, self.context
        cpu.hook("post_backward_final_callback")
        if context.sync_gradients:
            cpu.wait_stream(C, B)
            if context.hybrid:
                cpu.wait_stream(C, AR)
            if self.plan.cpu_offload:
                self.synchronize_compute()
        self.post_forward_order.clear()
        for handle in self.order:
            if not handle.sharded_data or handle.skipped_views:
                handle.reshard(free=self.frees_in_backward)
            if self.plan.cpu_offload and context.sync_gradients:
                handle.free_grads()
            handle.needs_pre_backward_unshard = handle.prefetched = False
            handle.post_forward_index = None

    def synchronize_compute(self) -> None:
        """``current_stream().synchronize()``: the optimizer is about to read gradients on the CPU."""
        cpu = self.cpu
        event = cpu.record(C)
        cpu.instructions[-1] = cpu.instructions[-1]._replace(detail=NOT_RECORDED)
        cpu.cpu_sync(event)
        cpu.instructions[-1] = cpu.instructions[-1]._replace(detail=str(C))
