"""`build`: run the machine of one group per unit through training steps and keep what the CPU issued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_sim.schedule.cpu import Cpu
from fsdp_sim.schedule.group import CommContext, ParamGroup, TrainingState
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.unit import Unit
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Lane, Op, Phase


def build(units: Sequence[Unit], plan: Plan, world_size: int, steps: int = 1) -> Program:
    """The program torch's ``fully_shard`` issues for these units.

    Args:
        units: exactly one root (the one whose segments contain ``...``) and its layers in execution order. A unit
            without parameters issues compute alone.
        plan: how they are trained.
        world_size: ranks the parameters are sharded over. 1 issues no collectives.
        steps: optimizer steps.

    Raises:
        ValueError: no root or several, a name used twice, nothing to train, or a number below 1.

    Example:
        >>> from fsdp_sim.schedule import toy
        >>> program = build(toy(layers=3), Plan(), world_size=8)
        >>> print(*program.lines()[:4], sep="\\n")
        --- step 0 microbatch 0: forward
        wait_stream ag_copy_in      compute
        wait_stream all_gather      compute
        hook        -               pre_forward(root)
    """
    _validate(units, plan, world_size, steps)
    trainer = _Trainer(units, plan, world_size)
    for step in range(steps):
        trainer.train_step(step)
    return Program(tuple(units), plan, world_size, tuple(trainer.cpu.instructions))


def _validate(units: Sequence[Unit], plan: Plan, world_size: int, steps: int) -> None:
    for what, value in (("world_size", world_size), ("steps", steps)):
        if type(value) is not int or value < 1:
            raise ValueError(f"{what} is {value!r}; it must be a whole number >= 1")
    if not isinstance(plan, Plan):
        raise ValueError(f"plan is {plan!r}; it must be a Plan, for example Plan(forward_prefetch=1)")
    roots = [u.name for u in units if u.is_root]
    if len(roots) != 1:
        raise ValueError(
            f"{len(roots)} of {len(units)} units are roots ({', '.join(roots) or 'none'}); exactly one must have "
            f"... in its segments, to mark where the layers run"
        )
    names_of = {"unit": [u.name for u in units], "segment": [s for u in units for s in u.names_of_segments]}
    for what, names in names_of.items():
        twice = [n for n in names if names.count(n) > 1]
        if twice:
            raise ValueError(f"two units have the {what} name {twice[0]!r}; each {what} needs its own name")
    if not any(p.requires_grad for u in units for p in u.params):
        raise ValueError(f"none of the {len(units)} units has a parameter that requires gradients; nothing to train")
    for unit in units:
        dtypes = sorted({p.dtype for p in unit.params if p.requires_grad})
        if len(dtypes) > 1:
            raise ValueError(
                f"unit {unit.name} trains parameters of dtypes {', '.join(dtypes)}; one reduce-scatter needs one dtype"
            )


@dataclass(frozen=True)
class _State:
    """A unit, its group if it has parameters, and which of its tensors autograd follows."""

    unit: Unit
    group: ParamGroup | None
    input_requires_grad: bool
    output_requires_grad: bool
    with_backward: frozenset[str]  # segments whose output requires gradients


class _Trainer:
    """The training loop: the hooks of torch's ``FSDPState`` around each unit's compute."""

    def __init__(self, units: Sequence[Unit], plan: Plan, world_size: int) -> None:
        self.cpu = Cpu()
        self.comm = CommContext()
        self.plan = plan
        root = next(u for u in units if u.is_root)
        layers = [u for u in units if not u.is_root]
        keep_root = plan.reshard_after_forward is None

        def state(unit: Unit, input_grad: bool, with_backward: list[str], output_grad: bool) -> _State:
            reshard = plan.reshard_after_forward is not False and not (unit.is_root and keep_root)
            group = ParamGroup(unit, self.cpu, self.comm, world_size, reshard) if unit.params else None
            return _State(unit, group, input_grad, output_grad, frozenset(with_backward))

        def follow(unit: Unit, segments: tuple[str, ...], requires_grad: bool) -> tuple[list[str], bool]:
            """The segments with a backward, and whether the output of the last one requires gradients."""
            found = []
            for segment in segments:
                requires_grad = requires_grad or unit.trains(segment)
                if requires_grad:
                    found.append(segment)
            return found, requires_grad

        before, requires_grad = follow(root, root.before_children(), False)  # tokens and images need no gradients
        self.layers = []
        for layer in layers:
            with_backward, output = follow(layer, layer.names_of_segments, requires_grad)
            self.layers.append(state(layer, requires_grad, with_backward, output))
            requires_grad = output
        after, requires_grad = follow(root, root.after_children(), requires_grad)
        self.root = state(root, False, before + after, requires_grad)
        self.groups = [s.group for s in (self.root, *self.layers) if s.group is not None]

    def train_step(self, step: int) -> None:
        last = self.plan.grad_accum - 1
        self.cpu.step = step
        for micro_batch in range(self.plan.grad_accum):
            self.cpu.micro_batch = micro_batch
            for group in self.groups:
                group.reduce_grads = self.plan.requires_gradient_sync is True or micro_batch == last
            self.forward()
            self.backward()
        self.optimizer()

    def forward(self) -> None:
        cpu, root = self.cpu, self.root
        cpu.phase = Phase.FORWARD
        cpu.wait_stream(Lane.AG_COPY_IN, Lane.COMPUTE)  # gathers must not overtake the optimizer
        cpu.wait_stream(Lane.ALL_GATHER, Lane.COMPUTE)
        if root.group:
            root.group.pre_forward()
        self._forward_of(root.unit.before_children())
        for i, layer in enumerate(self.layers):
            if layer.group:
                layer.group.pre_forward()
                for group in self._prefetched(self.layers[i + 1 :], self.plan.forward_prefetch):
                    group.unshard()
            self._forward_of(layer.unit.names_of_segments)
            if layer.group:
                layer.group.post_forward()
        self._forward_of(root.unit.after_children())
        if root.group:
            root.group.post_forward()
        if self.comm.all_gather_state is not None:
            last, copied_out = self.comm.all_gather_state
            cpu.wait(Lane.AG_COPY_IN, copied_out)
            cpu.wait(Lane.ALL_GATHER, copied_out)
            last.drop()
            self.comm.all_gather_state = None

    def backward(self) -> None:
        root = self.root
        self.cpu.phase = Phase.BACKWARD
        if root.group and root.output_requires_grad:
            root.group.pre_backward(default_prefetch=True)
        self._backward_of(root, root.unit.after_children())
        for i, layer in reversed(list(enumerate(self.layers))):
            if layer.group and layer.output_requires_grad:
                listed = self._prefetched(self.layers[:i][::-1], self.plan.backward_prefetch)
                layer.group.pre_backward(default_prefetch=not listed)
                for group in listed:
                    group.unshard()
            self._backward_of(layer, layer.unit.names_of_segments)
            if layer.group and layer.input_requires_grad:
                layer.group.post_backward()
        self._backward_of(root, root.unit.before_children())
        self.final_callback()

    def final_callback(self) -> None:
        """End of backward: run what autograd did not reach, then make compute wait for every reduction."""
        self.cpu.hook("root_post_backward_final_callback")
        for group in self.groups:
            if group.training_state is not TrainingState.POST_BACKWARD:
                group.post_backward()
            group.training_state = TrainingState.IDLE
            group.finalize_backward()
        self.comm.post_forward_order.clear()
        for kept in self.comm.reduce_scatter_states:
            self.cpu.wait(Lane.COMPUTE, kept.event)
        for kept in self.comm.reduce_scatter_states:
            kept.drop()
        self.comm.reduce_scatter_states.clear()

    def optimizer(self) -> None:
        self.cpu.phase = Phase.OPTIMIZER
        self.cpu.op(Op.OPTIM, "")
        # Gradients go in parameter order, and O with the last one that is a view of it.
        root = self.root
        root_is_last = any(root.unit.trains(segment) for segment in root.unit.after_children())
        for state in (*self.layers, root) if root_is_last else (root, *self.layers):
            if state.group:
                state.group.zero_grad()

    def _forward_of(self, segments: tuple[str, ...]) -> None:
        for segment in segments:
            self.cpu.op(Op.FWD, segment)

    def _backward_of(self, state: _State, segments: tuple[str, ...]) -> None:
        for segment in reversed(segments):
            if segment not in state.with_backward:
                continue
            if state.group:
                state.group.accumulate_grads(state.unit.params_of(segment))
            self.cpu.op(Op.BWD, segment)

    @staticmethod
    def _prefetched(nearest_first: list[_State], depth: int | None) -> list[ParamGroup]:
        return [s.group for s in nearest_first[: depth or 0] if s.group is not None]
