"""What torch itself issues for units and a plan: the network they describe, trained under the recorder.

The network is made of the units: every segment is a module that uses its parameters, every unit a module at the path
that is its name. So whatever a `Plan` says about `Unit`s can be compared with the installed torch, line by line.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp_sim.measure.record import ProgramRecorder, record
from fsdp_sim.schedule import Unit
from fsdp_sim.schedule.checkpointing import checkpoints
from fsdp_sim.schedule.tree import UnitNode, tree_of
from fsdp_sim.schedule.unit import root_of
from fsdp_sim.spec import Plan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def torch_lines(
    units: Sequence[Unit],
    plan: Plan,
    world_size: int,
    steps: int = 1,
    *,
    every_op: bool = False,
    fsdp: ModuleType = torch.distributed.fsdp,
) -> list[str]:
    """The program that ``fsdp.fully_shard`` issues for these units under a plan whose api is fsdp2.

    Args:
        fsdp: torch.distributed.fsdp, or fsdp_sim.mini, which offers the same names.

    Raises:
        Exception: whatever ``fsdp`` raises.
    """
    assert plan.api == "fsdp2", plan

    def run(recorder: ProgramRecorder) -> object:
        network = UnitModule(tree_of(units), recorder, checkpoints(units, plan))
        modules = dict(network.named_modules())
        layers = [modules[name] for name in dict.fromkeys(u.name for u in units if u is not root_of(units))]
        own = {modules[u.name]: u.reshard_after_forward for u in units if u is not root_of(units)}
        shard(network, layers, plan, world_size, fsdp, own)
        return train(network, plan, steps, recorder)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only lose by being shared out
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return record(run, world_size=world_size, every_op=every_op)
    finally:
        torch.set_num_threads(threads)


class Segment(nn.Module):
    """A piece of compute that uses its parameters, whatever their shapes, and saves tensors for backward."""

    def __init__(self, params: list[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        for name, param in params:
            self.register_parameter(name, param)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        for param in self.parameters(recurse=False):
            x = x * (param.to_local() if isinstance(param, DTensor) else param).sum()
        return x


class UnitModule(nn.Module):
    """The segments before, the units inside, the segments after; checkpointed where the plan says so."""

    def __init__(
        self, node: UnitNode, recorder: ProgramRecorder, checkpointed: dict[str, tuple[str, ...]], prefix: str = ""
    ) -> None:
        super().__init__()
        unit = node.unit
        self.checkpointed = checkpointed
        params = {
            p: nn.Parameter(torch.ones(p.shape, dtype=DTYPES[p.dtype]), requires_grad=p.requires_grad)
            for p in unit.params
        }

        def segments(names: tuple[str, ...], when: str) -> nn.ModuleList:
            self.names[when] = names
            made = nn.ModuleList()
            for segment in names:
                used = [(p.name.replace(".", "_"), params[p]) for p in unit.params if segment in unit.segments_of(p)]
                made.append(Segment(used))
                recorder.watch(made[-1], segment)
            setattr(self, when, made)
            return made

        self.names: dict[str, tuple[str, ...]] = {}
        self.before_children = segments(unit.before_children(), "segments_before")
        self.units_inside: list[nn.Module] = []
        for child in node.children:
            place: nn.Module = self
            *path, name = child.unit.name.removeprefix(prefix).split(".")
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            if not hasattr(place, name):  # else it runs again
                place.add_module(name, UnitModule(child, recorder, checkpointed, f"{child.unit.name}."))
            self.units_inside.append(getattr(place, name))
        self.after_children = segments(unit.after_children(), "segments_after")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.run("segments_before", x)
        for unit in self.units_inside:
            x = unit(x)
        return self.run("segments_after", x)

    def run(self, when: str, x: torch.Tensor) -> torch.Tensor:
        """Segments one after the other; those of a checkpoint together, in one."""
        modules = dict(zip(self.names[when], getattr(self, when), strict=True))
        for together in dict.fromkeys(self.checkpointed.get(name, (name,)) for name in modules):

            def compute(x: torch.Tensor, together: tuple[str, ...] = together) -> torch.Tensor:
                for name in together:
                    x = modules[name](x)
                return x

            x = checkpoint(compute, x, use_reentrant=False) if together[0] in self.checkpointed else compute(x)
        return x


def shard(
    network: Any,
    layers: list[Any],
    plan: Plan,
    world_size: int,
    fsdp: ModuleType,
    reshard: Mapping[Any, bool | None] | None = None,
) -> None:
    """`fully_shard` on every unit, inner ones first, and every setting of the plan.

    Args:
        layers: the modules of all units but the root, in order.
        reshard: ``reshard_after_forward`` of modules for which the plan leaves it to the unit.
    """
    options: dict[str, Any] = {"reshard_after_forward": plan.reshard_after_forward}
    if plan.shard_size is not None and plan.shard_size < world_size:
        sizes = (world_size // plan.shard_size, plan.shard_size)
        options["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    if plan.param_dtype or plan.reduce_dtype:
        dtypes = [DTYPES[dtype] if dtype else None for dtype in (plan.param_dtype, plan.reduce_dtype)]
        options["mp_policy"] = fsdp.MixedPrecisionPolicy(*dtypes)
    if plan.cpu_offload:
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    for module in (*reversed(layers), network):
        own = (reshard or {}).get(module) if plan.reshard_after_forward is None else None
        fsdp.fully_shard(module, **options if own is None else options | {"reshard_after_forward": own})
    for number, layer in enumerate(layers):
        if plan.forward_prefetch:
            layer.set_modules_to_forward_prefetch(layers[number + 1 : number + 1 + plan.forward_prefetch])
        if plan.backward_prefetch:
            before = layers[max(0, number - plan.backward_prefetch) : number]
            layer.set_modules_to_backward_prefetch(before[::-1])
    if plan.gradient_divide_factor is not None:
        for module in (*layers, network):
            module.set_gradient_divide_factor(plan.gradient_divide_factor)
    if plan.reduce_scatter_max_input_buffers > 1:
        network.set_reduce_scatter_max_input_buffers(plan.reduce_scatter_max_input_buffers)
    if plan.separate_reduce_scatter_group:
        network.set_separate_reduce_scatter_group()
    if plan.unshard_async_op:
        network._set_unshard_async_op(True)


def train(network: Any, plan: Plan, steps: int, recorder: ProgramRecorder) -> object:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for step in range(steps):
        for micro_batch in range(plan.grad_accum):
            last = micro_batch == plan.grad_accum - 1
            for setting in (
                "requires_gradient_sync", "requires_all_reduce", "reshard_after_backward", "is_last_backward"
            ):  # fmt: skip
                value = getattr(plan, setting)
                getattr(network, f"set_{setting}")(last if value == "last" else value)
            recorder.mark(f"step {step} microbatch {micro_batch}: forward")
            loss = network(torch.ones(2, 4)).sum()
            recorder.mark(f"step {step} microbatch {micro_batch}: backward")
            loss.backward()
            del loss
        recorder.mark(f"step {step}: optimizer")
        if plan.clip_grad_norm:
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if plan.post_optim_event:
            network.set_post_optim_event(recorder.device.current_stream().record_event())
        optimizer.zero_grad()
    return network
