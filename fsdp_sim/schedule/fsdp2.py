"""`build_fsdp2`: run the machine of one group per unit through training steps and keep what the CPU issued.

The hooks are those of torch's ``FSDPState``; the walk through forward and backward is what autograd does with a model
whose pieces of compute run one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_sim.schedule.activation_offload import ActivationOffload
from fsdp_sim.schedule.checkpointing import checkpoints
from fsdp_sim.schedule.comm import EXPERTS, comm_context
from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.group import ParamGroup
from fsdp_sim.schedule.layout import Layout, layout_of
from fsdp_sim.schedule.mesh import mesh_of, mesh_of_unit
from fsdp_sim.schedule.optimizer import optimizer_step
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.tree import UnitNode, in_order_of_modules, tree_of
from fsdp_sim.schedule.unit import Exchange, Unit
from fsdp_sim.spec import Plan
from fsdp_sim.states import TrainingState
from fsdp_sim.timeline import Lane, Op, Phase


def build_fsdp2(units: Sequence[Unit], plan: Plan, world_size: int, steps: int = 1) -> Program:
    """The program torch's ``fully_shard`` issues, called on every unit, inner units first.

    See `fsdp_sim.schedule.build` for the arguments, which it has checked.

    Raises:
        ValueError: ``reshard_after_forward`` does not divide the ranks of a shard group; a unit trains parameters of
            several dtypes; torch itself fails with these units and this plan.
    """
    trainer = _Trainer(units, plan, world_size)
    for step in range(steps):
        trainer.train_step(step)
    once = tuple({unit.name: unit for unit in units}.values())
    runs = tuple(units) if len(once) < len(units) else ()
    return Program(once, plan, world_size, tuple(trainer.cpu.instructions), runs)


@dataclass
class _State:
    """A run of a unit, its group if it has parameters, and what autograd follows of it.

    Attributes:
        is_first: of the runs of its unit in a forward; its backward comes last and completes the gradients.
        before, after: segments around the units inside.
        grads: of each segment with a backward, the gradients it computes: (parameter, bytes).
        forward_prefetch, backward_prefetch: groups of the explicit lists.
        lists_backward: an explicit backward list is set, maybe of units without parameters.
    """

    unit: Unit
    group: ParamGroup | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    children: list[_State] = field(default_factory=list)
    grads: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    input_requires_grad: bool = False
    output_requires_grad: bool = False
    is_first: bool = True
    forward_prefetch: tuple[ParamGroup, ...] = ()
    backward_prefetch: tuple[ParamGroup, ...] = ()
    lists_backward: bool = False


class _Trainer:
    """The training loop: the hooks of torch's ``FSDPState`` around each unit's compute."""

    def __init__(self, units: Sequence[Unit], plan: Plan, world_size: int) -> None:
        self.plan, self.units = plan, units
        self.cpu = Cpu()
        self.comm, self.mesh = comm_context(plan, self.cpu), mesh_of(plan, world_size)
        self._arriving: dict[str, int] = {}  # tokens on their way back: by the segment that needs them, their end
        self._layouts: dict[int, Layout] = {}
        self._checkpoints = checkpoints(units, plan)
        tree = tree_of(units)
        self._groups: dict[str, ParamGroup | None] = {}
        self._states: list[_State] = []
        self.root = self._state(tree, is_root=True)
        self._follow(self.root, False)  # tokens and images need no gradients
        self._offload: ActivationOffload | None = None
        if plan.activation_offload:
            with_backward = {segment for state in self._states for segment in state.grads}
            some = [segment for segment in _in_forward_order(self.root) if segment in with_backward]
            self._offload = ActivationOffload(self.cpu, plan, some, self.root.after, list(self._checkpoints))
        self._set_prefetch([unit.name for unit in units if unit is not tree.unit])
        modules = in_order_of_modules([node for node in tree if node is not tree])
        names = list(dict.fromkeys([tree.unit.name, *(node.unit.name for node in modules)]))
        self.groups = self._groups_of(names)
        of_modules = {name: number for number, name in enumerate(names)}
        self.in_order_of_grads = _in_order_of_grads(self.root, of_modules)
        self.post_optim_event = 0

    def _state(self, node: UnitNode, is_root: bool) -> _State:
        unit, reshard = node.unit, self.plan.reshard_after_forward
        if reshard is None:
            reshard = not is_root if unit.reshard_after_forward is None else unit.reshard_after_forward
        elif type(reshard) is int:
            reshard = reshard != 1  # torch takes 1 for False
        is_first = unit.name not in self._groups
        if is_first:
            group = self._group(unit, bool(reshard)) if unit.params else None
            self._groups[unit.name] = group
        before: tuple[str, ...] = unit.names_of_segments
        after: tuple[str, ...] = ()
        if unit.is_root:
            before, after = unit.before_children(), unit.after_children()
        state = _State(unit, self._groups[unit.name], before, after, is_first=is_first)
        state.children = [self._state(child, is_root=False) for child in node.children]
        self._states.append(state)
        return state

    def _group(self, unit: Unit, reshard_after_forward: bool) -> ParamGroup:
        """Layers often share their parameters' descriptions; then they share the layout."""
        mesh = mesh_of_unit(unit, self.mesh, self.plan)
        if id(unit.params) not in self._layouts:
            self._layouts[id(unit.params)] = layout_of(unit, self.plan, mesh)
        return ParamGroup(unit.name, self._layouts[id(unit.params)], self.comm, mesh, reshard_after_forward)

    def _follow(self, state: _State, requires_grad: bool) -> bool:
        """Follow requires_grad through a unit; returns whether its output has it."""
        state.input_requires_grad = requires_grad
        by_segment = _grads_by_segment(state.unit, state.group.layout) if state.group else {}

        def compute(segments: tuple[str, ...]) -> None:
            nonlocal requires_grad
            for segment in segments:
                requires_grad = requires_grad or segment in by_segment
                if requires_grad:
                    state.grads[segment] = by_segment.get(segment, ())

        compute(state.before)
        for child in state.children:
            requires_grad = self._follow(child, requires_grad)
        compute(state.after)
        state.output_requires_grad = requires_grad
        return requires_grad

    def _set_prefetch(self, runs: list[str]) -> None:
        forward, backward = self.plan.forward_prefetch or 0, self.plan.backward_prefetch or 0
        if not forward and not backward:
            return
        experts = {unit.name for unit in self.units if unit.exchange} if self.plan.expert_parallel > 1 else set()
        layers = [name for name in dict.fromkeys(runs) if name not in experts]
        number_of = {name: number for number, name in enumerate(layers)}

        def groups_of(listed: list[str]) -> tuple[ParamGroup, ...]:
            """Of layers, each with its experts, as torchtitan lists them."""
            return self._groups_of(
                name for layer in listed for name in (layer, *(e for e in experts if e.startswith(f"{layer}.")))
            )

        for state in self._states:
            number = number_of.get(state.unit.name)
            if number is not None:  # the root has no lists
                state.forward_prefetch = groups_of(layers[number + 1 : number + 1 + forward])
                listed = layers[max(0, number - backward) : number][::-1]
                state.backward_prefetch, state.lists_backward = groups_of(listed), bool(listed)

    def _groups_of(self, names: Iterable[str]) -> tuple[ParamGroup, ...]:
        """Of units that have parameters, each once."""
        return tuple(group for name in dict.fromkeys(names) if (group := self._groups[name]) is not None)

    # -- tokens of experts, as ``ExpertParallel`` of torchtitan 0.2.2 exchanges them, on a stream of its process group

    def _exchange(self, state: _State) -> Exchange | None:
        return state.unit.exchange if self.plan.expert_parallel > 1 else None

    def _dispatch(self, unit: str, exchange: Exchange) -> None:
        """How many tokens come is known when the numbers have arrived on the CPU."""
        self._wait_for_tokens(unit, exchange.count_bytes, "int64")
        self.cpu.cpu_sync_stream(Lane.COMPUTE)
        self._wait_for_tokens(unit, exchange.bytes, exchange.dtype)

    def _return(self, unit: str, exchange: Exchange) -> None:
        self._arriving[exchange.needed_by] = self._all_to_all(unit, exchange.bytes, exchange.dtype)

    def _wait_for_returning(self, segment: str) -> None:
        if segment in self._arriving:
            self.cpu.wait(Lane.COMPUTE, self._arriving.pop(segment), str(Op.ALL_TO_ALL))

    def _wait_for_tokens(self, unit: str, n_bytes: int, dtype: str) -> None:
        self.cpu.wait(Lane.COMPUTE, self._all_to_all(unit, n_bytes, dtype), str(Op.ALL_TO_ALL))

    def _all_to_all(self, unit: str, n_bytes: int, dtype: str) -> int:
        ranks = self.plan.expert_parallel
        return self.cpu.collective(Op.ALL_TO_ALL, unit, Lane.COMPUTE, n_bytes, dtype, "", ranks, EXPERTS, async_op=True)

    # -- a step

    def train_step(self, step: int) -> None:
        self.cpu.step = step
        for micro_batch in range(self.plan.grad_accum):
            self.cpu.micro_batch = micro_batch
            is_last = self._set_accumulation(micro_batch == self.plan.grad_accum - 1)
            self.cpu.phase = Phase.FORWARD
            self._root_pre_forward()
            self._forward(self.root)
            self.comm.flush_all_gather_state()
            if self._offload:
                self._offload.end_of_forward()
            self.cpu.phase = Phase.BACKWARD
            self._backward(self.root)
            self._final_callback(is_last)
        self.cpu.phase = Phase.OPTIMIZER
        optimizer_step(self.cpu, self.units, self.plan, self.mesh.shards * self.mesh.replicas)
        if self.plan.post_optim_event:
            self.post_optim_event = self.cpu.record(Lane.COMPUTE)
        for group in self.in_order_of_grads:
            group.grads.zero_grad()

    def _set_accumulation(self, last: bool) -> bool:
        plan = self.plan

        def now(setting: bool | str) -> bool:
            return last if setting == "last" else bool(setting)

        for group in self.groups:
            group.grads.reduce_grads = now(plan.requires_gradient_sync)
            group.all_reduce_grads = now(plan.requires_all_reduce)
            group.reshard_after_backward = now(plan.reshard_after_backward)
        return now(plan.is_last_backward)

    def _root_pre_forward(self) -> None:
        """Gathers must not overtake the optimizer."""
        if self.post_optim_event:
            self.comm.all_gather_streams_wait(self.post_optim_event)
            self.post_optim_event = 0
            return
        self.cpu.wait_stream(Lane.AG_COPY_IN, Lane.COMPUTE)
        self.cpu.wait_stream(Lane.ALL_GATHER, Lane.COMPUTE)

    def _forward(self, state: _State) -> None:
        if state.group:
            state.group.pre_forward()
        for group in state.forward_prefetch:
            group.unshard()
        if exchange := self._exchange(state):
            self._dispatch(state.unit.name, exchange)
        self._forward_of(state.before)
        for child in state.children:
            self._forward(child)
        self._forward_of(state.after)
        if exchange:
            self._return(state.unit.name, exchange)
        if state.group:
            state.group.post_forward()

    def _forward_of(self, segments: tuple[str, ...]) -> None:
        for segment in segments:
            self._wait_for_returning(segment)
            self.cpu.op(Op.FWD, segment)
            if self._offload:
                self._offload.forward(segment)

    def _backward(self, state: _State, around: tuple[_State, ...] = ()) -> None:
        """Backward of a unit; ``around`` are the units that end where it ends, so have the same output tensor."""
        inner, exchange = list(state.children), self._exchange(state)
        if inner and not state.after:
            self._backward(inner.pop(), (state, *around))  # hooks of one tensor run in the order they were made
        else:
            for each in (state, *around):
                self._pre_backward(each)
            if exchange and state.output_requires_grad:
                self._wait_for_tokens(state.unit.name, exchange.bytes, exchange.dtype)
            self._backward_of(state, state.after)
        for child in reversed(inner):
            self._backward(child)
        self._backward_of(state, state.before)
        if exchange and state.input_requires_grad:
            self._wait_for_tokens(state.unit.name, exchange.bytes, exchange.dtype)
        if state.group and state.input_requires_grad:
            state.group.post_backward()

    def _pre_backward(self, state: _State) -> None:
        if not state.output_requires_grad:
            return
        if state.group:
            state.group.pre_backward(default_prefetch=not state.lists_backward)
        for group in state.backward_prefetch:
            group.unshard()

    def _backward_of(self, state: _State, segments: tuple[str, ...]) -> None:
        for segment in reversed(segments):
            block = self._checkpoints.get(segment, ())
            if self._offload and segment in state.grads:
                self._offload.before_backward(block or (segment,))
            if block and block[-1] == segment and any(again in state.grads for again in block):
                self._recompute(state, block)
            grads = state.grads.get(segment)
            if grads is None:
                continue
            if state.group and grads:
                state.group.grads.computed(grads, complete=state.is_first)
            self.cpu.op(Op.BWD, segment)
            if state.group and state.group.grads.to_add:
                state.group.grads.added()
            if self._offload:
                self._offload.after_backward()

    def _recompute(self, state: _State, block: tuple[str, ...]) -> None:
        """A checkpoint's forward, again. Hooks of a unit of experts inside of it run again too: as those of a root, for
        there is no other forward, and without resharding, for backward comes next.
        """
        experts = {segment: child for child in state.children for segment in child.before if child.unit.exchange}
        for again in block:
            child = experts.get(again)
            exchange = child and self._exchange(child)
            if child and child.group:
                self._root_pre_forward()
                child.group.pre_forward()
            if child and exchange:
                self._dispatch(child.unit.name, exchange)
            self._wait_for_returning(again)
            self.cpu.op(Op.RECOMPUTE, again)
            if child and exchange:
                self._return(child.unit.name, exchange)
            if child and child.group:
                child.group.post_forward_again()
                self.comm.flush_all_gather_state()

    def _final_callback(self, is_last: bool) -> None:
        """End of backward: run what autograd did not reach; after the last make compute wait for every reduction."""
        self.cpu.hook("root_post_backward_final_callback")
        for group in self.groups:
            if group.training_state is not TrainingState.POST_BACKWARD:
                group.post_backward()
            group.training_state = TrainingState.IDLE
            if is_last and not self.comm.torch_2_15:
                group.finalize_backward()
        if is_last and self.comm.torch_2_15:
            self.comm.wait_for_last_reductions()
            for group in self.groups:
                group.finalize_backward()
        if is_last:
            self.comm.post_forward_order.clear()
            self.comm.release_all_reduce_scatters()


def _in_forward_order(state: _State) -> list[str]:
    """The segments of a unit and of those inside it."""
    return [*state.before, *(s for child in state.children for s in _in_forward_order(child)), *state.after]


def _grads_by_segment(unit: Unit, layout: Layout) -> dict[str, tuple[tuple[int, int], ...]]:
    """Gradients that the backward of each segment computes: (parameter, bytes)."""
    uses, sizes = unit.uses, layout.grad_bytes
    segments = unit.names_of_segments
    if len(segments) == 1:
        return {segments[0]: sizes} if sizes else {}
    grads = {segment: tuple(size for size in sizes if segment in uses[size[0]]) for segment in segments}
    return {segment: some for segment, some in grads.items() if some}


def _in_order_of_grads(root: _State, of_modules: dict[str, int]) -> list[ParamGroup]:
    """Gradients go in parameter order, and O with the last one that is a view of it."""
    order: list[ParamGroup] = []

    def visit(state: _State) -> None:
        group, after = state.group if state.is_first else None, state.after
        homes = [state.unit.uses[k][0] for k in group.layout.trained] if group and after and state.before else []
        goes_last = any(home in after for home in homes) if homes else bool(after)
        if group and not goes_last:
            order.append(group)
        for child in sorted(state.children, key=lambda child: of_modules[child.unit.name]):
            visit(child)
        if group and goes_last:
            order.append(group)

    visit(root)
    return order
