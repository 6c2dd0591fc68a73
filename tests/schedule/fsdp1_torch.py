"""What torch's own FSDP1 issues for units and a plan, recorded on a model built to be those units."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)

from fsdp_sim.measure.record import ProgramRecorder, record
from fsdp_sim.schedule.checkpointing import checkpoints
from fsdp_sim.schedule.tree import UnitNode, tree_of
from fsdp_sim.schedule.unit import Unit, root_of
from fsdp_sim.spec import Plan

DTYPES = {None: None, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PREFETCH = {
    None: BackwardPrefetch.BACKWARD_PRE,
    "BACKWARD_PRE": BackwardPrefetch.BACKWARD_PRE,
    "BACKWARD_POST": BackwardPrefetch.BACKWARD_POST,
    "none": None,
}


class Segment(nn.Module):
    """``y = sin(x) @ w`` for each parameter."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self.names = [f"w{i}" for i in range(len(weights))]
        for name, weight in zip(self.names, weights, strict=True):
            self.register_parameter(name, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x)  # autograd keeps x, so a checkpoint always has something to compute again
        for name in self.names:  # FSDP puts plain tensors where parameters were
            y = y @ getattr(self, name)
        return y


class Module(nn.Module):
    """A unit: its segments, and the units inside it where it has ``...``."""

    def __init__(self, node: UnitNode) -> None:
        super().__init__()
        unit = node.unit
        self.node = node
        weights = {
            p.name: nn.Parameter(torch.randn(4, 4, dtype=DTYPES[p.dtype]), requires_grad=p.requires_grad)
            for p in unit.params
        }

        def sequential(segments: tuple[str, ...]) -> nn.Sequential:
            return nn.Sequential(*(Segment([weights[p.name] for p in unit.params_of(s)]) for s in segments))

        self.before = sequential(unit.before_children())
        self.after = sequential(unit.after_children())
        self.paths = [child.unit.name.removeprefix(f"{unit.name}.") for child in node.children]
        for path, child in zip(self.paths, node.children, strict=True):
            self.put(path, Module(child))

    def put(self, path: str, module: nn.Module) -> None:
        """Make ``module`` the submodule of that path."""
        around: nn.Module = self
        *containers, name = path.split(".")
        for container in containers:
            if not hasattr(around, container):
                around.add_module(container, nn.Module())
            around = getattr(around, container)
        around.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (self.before, *map(self.get_submodule, self.paths), self.after):
            x = module(x)
        return x

    def wrap(self, units: list[Unit], plan: Plan, options: dict[str, object]) -> nn.Module:
        """FSDP1 around the units, inner ones first."""
        unit, again = self.node.unit, checkpoints(units, plan)
        pieces = {"before": unit.before_children(), "after": unit.after_children()}
        for when, piece in pieces.items():
            inside = getattr(self, when)
            if piece and again.get(piece[0]) == piece and not unit.blocks:
                setattr(self, when, checkpoint_wrapper(inside))
            else:
                for number, name in enumerate(piece):
                    if name in again:
                        inside[number] = checkpoint_wrapper(inside[number])
        for path in self.paths:
            self.put(path, self.get_submodule(path).wrap(units, plan, options))
        is_root = self.node.unit is root_of(units)
        return FullyShardedDataParallel(self, **options) if self.node.unit.params or is_root else self


def recorded(units: list[Unit], plan: Plan, world_size: int, steps: int = 1, *, every_op: bool = False) -> list[str]:
    """The program of torch's `FullyShardedDataParallel` for these units, whose names must be ``layers.0`` and so on."""

    def train(recorder: ProgramRecorder) -> object:
        model = Module(tree_of(units))
        for module in model.modules():
            if isinstance(module, Module):
                segments = (*module.before, *module.after)
                for name, segment in zip(module.node.unit.names_of_segments, segments, strict=True):
                    recorder.watch(segment, name)
        model = model.wrap(units, plan, _options(units, plan, world_size))
        dtype = DTYPES[next(p.dtype for u in units for p in u.params)]
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for step in range(steps):
            for micro_batch in range(plan.grad_accum):
                last = micro_batch == plan.grad_accum - 1
                label = f"step {step}" + (f" microbatch {micro_batch}" if plan.grad_accum > 1 else "")
                sync = plan.requires_gradient_sync is True or last
                with nullcontext() if sync else model.no_sync():
                    recorder.mark(f"{label}: forward")
                    loss = model(torch.ones(2, 4, dtype=dtype)).sum()
                    recorder.mark(f"{label}: backward")
                    loss.backward()
            recorder.mark(f"step {step}: optimizer")
            optimizer.step()
            optimizer.zero_grad()
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return record(train, world_size=world_size, every_op=every_op)


def _options(units: list[Unit], plan: Plan, world_size: int) -> dict[str, object]:
    options: dict[str, object] = {
        "device_id": torch.device("cpu"),
        "sharding_strategy": ShardingStrategy[plan.sharding_strategy],
        "backward_prefetch": PREFETCH[plan.backward_prefetch],
        "forward_prefetch": bool(plan.forward_prefetch),
        "limit_all_gathers": plan.limit_all_gathers,
        "cpu_offload": CPUOffload(offload_params=plan.cpu_offload),
        "mixed_precision": MixedPrecision(param_dtype=DTYPES[plan.param_dtype], reduce_dtype=DTYPES[plan.reduce_dtype]),
        "use_orig_params": any(len({p.requires_grad for p in u.params}) > 1 for u in units),
    }
    if "HYBRID" in plan.sharding_strategy:
        shard_size = plan.shard_size or world_size
        options["device_mesh"] = init_device_mesh(
            "cpu", (world_size // shard_size, shard_size), mesh_dim_names=("replicate", "shard")
        )
    return options
