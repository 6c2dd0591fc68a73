"""What torch issues for a model with experts that ranks share out, sharded as torchtitan 0.2.2 does it.

Its ``models/llama4/infra/parallelize.py`` cuts the experts' parameters over a mesh "ep", calls `fully_shard` on them
with the mesh "efsdp" and on their block with all ranks, and lists both for prefetching. Its
``distributed/expert_parallel.py`` exchanges the tokens, in hooks of the experts' module inside those of `fully_shard`.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from fsdp_sim.measure.record import ProgramRecorder, record
from fsdp_sim.schedule import Exchange, Param, Unit, checkpoints
from fsdp_sim.spec import Plan
from tests.schedule.against_torch import DTYPES, Segment, train

EXPERTS, TOKENS = 4, 8
OF_EXPERTS = (Param("up", (EXPERTS, 6)), Param("down", (EXPERTS, 3)))


def units_of(layers: int) -> tuple[Unit, ...]:
    """Every second layer has experts, and computes something else between them and the sum of all."""
    units = [Unit("root", (Param("embed", (4, 4)), Param("head", (4, 4))), ("embed", ..., "head"))]
    for i in range(layers):
        name = f"layers.{i}"
        if i % 2 == 0:
            units.append(Unit(name, (Param("weight", (4, 4)),)))
            continue
        params = (Param("weight", (4, 4)), Param("shared", (5,), used_by=(f"{name}.shared",)))
        units.append(Unit(name, params, (name, ..., f"{name}.shared", f"{name}.sum")))
        exchange = Exchange(bytes=TOKENS * 4, needed_by=f"{name}.sum", count_bytes=8 * EXPERTS)
        units.append(Unit(f"{name}.experts", OF_EXPERTS, exchange=exchange))
    return tuple(units)


def recorded(layers: int, plan: Plan, world_size: int, *, gloo: bool) -> list[str]:
    """The program of rank 0.

    Args:
        gloo: on the ranks of the process group that there is; else on one of a fake one, where no token travels.
    """

    def run(recorder: ProgramRecorder) -> object:
        meshes = _meshes(plan, world_size)
        network = _Network(layers, plan, meshes["ep"], recorder, gloo)
        _shard(network, plan, meshes)
        return train(network, plan, 2, recorder)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return record(run, world_size=None if gloo else world_size, every_op=True)


def _meshes(plan: Plan, world_size: int) -> dict[str, DeviceMesh]:
    shards = plan.shard_size or world_size
    replicas, ranks = world_size // shards, plan.expert_parallel
    dense = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("dp_replicate", "fsdp"))
    sparse = init_device_mesh("cpu", (replicas, shards // ranks, ranks), mesh_dim_names=("dp_replicate", "efsdp", "ep"))
    hybrid = ("dp_replicate",) if replicas > 1 else ()
    return {"fsdp": dense[(*hybrid, "fsdp")], "efsdp": sparse[(*hybrid, "efsdp")], "ep": sparse["ep"]}


class _Experts(nn.Module):
    def __init__(self, name: str, ep: DeviceMesh, recorder: ProgramRecorder, gloo: bool) -> None:
        super().__init__()
        self.ep, self.gloo = ep, gloo
        params = [(p.name, torch.ones(p.shape[0] // ep.size(), *p.shape[1:])) for p in OF_EXPERTS]
        self.compute = Segment([(n, nn.Parameter(DTensor.from_local(p, ep, [Shard(0)]))) for n, p in params])
        recorder.watch(self.compute, name)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        group, ranks = self.ep.get_group(), self.ep.size()
        with torch.no_grad():
            sent = torch.full((EXPERTS,), TOKENS // EXPERTS)
            came = torch.ops._c10d_functional.wait_tensor(all_to_all_single(sent, None, None, group))
            came = came if self.gloo else sent  # a fake collective moves no data
            to = sent.view(ranks, -1).sum(1).to(torch.device("cpu"), non_blocking=True).tolist()
            of = came.view(ranks, -1).sum(1).to(torch.device("cpu"), non_blocking=False).tolist()
        assert of == [TOKENS // ranks] * ranks
        tokens = all_to_all_single_autograd(tokens, of, to, group)
        tokens = self.compute(tokens * 1)  # laid out by expert
        return all_to_all_single_autograd(tokens, to, of, group)


class _Block(nn.Module):
    def __init__(self, name: str, ep: DeviceMesh, recorder: ProgramRecorder, gloo: bool) -> None:
        super().__init__()
        self.before = Segment([("weight", nn.Parameter(torch.ones(4, 4)))])
        self.experts = _Experts(f"{name}.experts", ep, recorder, gloo)
        self.shared = Segment([("shared", nn.Parameter(torch.ones(5)))])
        self.sum = Segment([])
        for segment, of in ((self.before, ""), (self.shared, ".shared"), (self.sum, ".sum")):
            recorder.watch(segment, name + of)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        routed = self.experts(x.reshape(TOKENS, 1))
        shared = self.shared(x)
        return self.sum(shared + routed.reshape(x.shape))


class _Network(nn.Module):
    def __init__(self, layers: int, plan: Plan, ep: DeviceMesh, recorder: ProgramRecorder, gloo: bool) -> None:
        super().__init__()
        self.embed = Segment([("weight", nn.Parameter(torch.ones(4, 4)))])
        made: list[Any] = []
        for i in range(layers):
            name = f"layers.{i}"
            if i % 2:
                made.append(_Block(name, ep, recorder, gloo))
            else:
                made.append(nn.Sequential(Segment([("weight", nn.Parameter(torch.ones(4, 4)))])))
                recorder.watch(made[-1][0], name)
        self.layers = nn.ModuleList(made)
        self.head = Segment([("weight", nn.Parameter(torch.ones(4, 4)))])
        recorder.watch(self.embed, "embed")
        recorder.watch(self.head, "head")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _checkpoint(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


def _shard(network: _Network, plan: Plan, meshes: dict[str, DeviceMesh]) -> None:
    options: dict[str, Any] = {"reshard_after_forward": plan.reshard_after_forward}
    dtypes = [DTYPES[dtype] if dtype else None for dtype in (plan.param_dtype, plan.reduce_dtype)]
    options["mp_policy"] = MixedPrecisionPolicy(*dtypes)
    if plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    with_experts = []
    checkpointed = checkpoints(units_of(len(network.layers)), plan)
    for i, layer in enumerate(network.layers):
        if f"layers.{i}" in checkpointed:  # around the block, so inside of what fully_shard is called on
            _checkpoint(layer)
        modules = [layer]
        if isinstance(layer, _Block):
            fully_shard(layer.experts, mesh=meshes["efsdp"], **options)
            layer.experts.set_gradient_divide_factor(plan.gradient_divide_factor or float(dist.get_world_size()))
            modules.append(layer.experts)
        fully_shard(layer, mesh=meshes["fsdp"], **options)
        with_experts.append(modules)
    fully_shard(network, mesh=meshes["fsdp"], **options)
    if plan.gradient_divide_factor is not None:
        for module in (network, *network.layers):
            module.set_gradient_divide_factor(plan.gradient_divide_factor)
    for i, layer in enumerate(network.layers):
        if plan.forward_prefetch:
            listed = with_experts[i + 1 : i + 1 + plan.forward_prefetch]
            layer.set_modules_to_forward_prefetch([m for modules in listed for m in modules])
        if plan.backward_prefetch:
            listed = with_experts[max(0, i - plan.backward_prefetch) : i][::-1]
            layer.set_modules_to_backward_prefetch([m for modules in listed for m in modules])
