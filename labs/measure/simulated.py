"""A run of the trainer as the simulator knows it: the same settings, model and machines in its words."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import torch

from fsdp_sim.cost import Workload
from fsdp_sim.measure.model_from_module import model_from_module
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Gpu, Plan, gpu, gpu_names
from fsdp_sim.timeline import Memory
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.model import ModelConfig, empty
from labs.wrapping.mesh import is_hybrid, shard_size
from labs.wrapping.precision import DTYPES
from labs.wrapping.wrap_policy import find_units

WHOLE_MODEL = ("single", "ddp")
RELATIVES = {
    (7, 0): "V100", (7, 5): "T4", (8, 0): "A100", (8, 6): "A10$|A40|RTX-A|RTX-3", (8, 9): "L4$|L40S|RTX-4|RTX-6000-Ada",
    9: "H100|H200|H800|GH200", 10: "G?B[23]00", 12: "RTX-5|RTX-PRO",
}  # fmt: skip
"""By compute capability, or its first number: the catalogue's parts that a GPU which it lacks may be like. Those that
do less than half of the matmuls of their multiprocessors are left out (A10G, L40, H20)."""
GEFORCE = re.compile(r"RTX-\d{4}")
"""Parts whose matrix units do half of what others' do, accumulating in float32."""
RATES = (
    "mem_bytes_per_s", "stream_bytes_per_s", "sustained_matmul_flops", "attention_flops", "tdp_w",
    *(f"{dtype}_flops" for dtype in ("bf16", "fp16", "tf32", "fp32", "fp8")),
)  # fmt: skip


def plan_of(config: TrainConfig, place: RankPlace) -> Plan:
    """The run's plan, with what follows from the model and from the number of ranks."""
    plan, rows, sharded = config.plan, config.global_batch // place.world_size, config.api not in WHOLE_MODEL
    micro_batch = config.micro_batch or rows
    mixed = sharded and plan.param_dtype != "fp32"
    return dataclasses.replace(
        plan,
        micro_batch=micro_batch,
        grad_accum=rows // micro_batch,
        wrap=find_units(empty(config.model_config), plan.wrap).names or "root",
        param_dtype=plan.param_dtype if mixed else None,  # single and ddp compute in autocast: it is in the trace
        reduce_dtype=(plan.reduce_dtype or ("fp32" if mixed else None)) if sharded else None,
        shard_size=shard_size(config, place) if is_hybrid(config) else None,
        is_last_backward="last" if plan.api == "fsdp2" else plan.is_last_backward,
    )


def cluster_of(place: RankPlace, device: torch.device) -> Cluster:
    """The machines: GPUs like this process's, or processes on CPU cores."""
    if device.type == "cpu":
        return Cluster("cpu", gpus=place.world_size)
    return Cluster(gpu_here(device), gpus=place.world_size, gpus_per_node=place.local_world_size)


def gpu_here(device: torch.device) -> Gpu:
    """This process's GPU: from the catalogue, by its driver's name; one that the catalogue lacks is estimated.

    An estimate has the rates of the part that is most like it, in proportion to their multiprocessors (a MIG slice has
    some of its GPU's), and says so in `Gpu.notes`.
    """
    try:
        return gpu(torch.cuda.get_device_name(device))
    except ValueError:
        return _estimated(torch.cuda.get_device_properties(device))


def _estimated(found: Any) -> Gpu:
    relatives = RELATIVES.get((found.major, found.minor)) or RELATIVES.get(found.major) or ""
    parts = [gpu(name) for name in gpu_names() if re.match(relatives, name)]

    def unlike(part: Gpu) -> tuple[bool, float]:
        ratios = (part.sms / found.multi_processor_count, part.mem_bytes / found.total_memory)
        same_units = bool(GEFORCE.fullmatch(part.name)) == ("GeForce" in found.name)
        return not same_units, sum(abs(math.log(ratio)) for ratio in ratios)

    near = min(parts, key=unlike)
    share = found.multi_processor_count / near.sms
    rates = {key: share * value for key in RATES if (value := getattr(near, key)) is not None}
    note = (
        f"The catalogue has no {found.name}: its rates are taken to be {share:.2f} of those of {near.name}, as are its "
        "multiprocessors, and its links to be that part's; fsdp-sim calibrate --device cuda measures them."
    )
    return dataclasses.replace(
        near, name=found.name, mem_bytes=float(found.total_memory), sms=found.multi_processor_count, sources=(),
        notes=note, **rates,
    )  # fmt: skip


def simulated(config: TrainConfig, model_config: ModelConfig, place: RankPlace, device: torch.device) -> Simulation:
    """The simulation of a run, with the cost of each kernel as the catalogue has it."""
    plan = plan_of(config, place)
    return simulate(_workload(config, model_config, plan, device), cluster_of(place, device), plan)


def _workload(config: TrainConfig, model_config: ModelConfig, plan: Plan, device: torch.device) -> Workload:
    rows = torch.zeros(plan.micro_batch, plan.seq_len, dtype=torch.int64)
    kernels_of: Any = "cpu" if device.type == "cpu" else "gpu"
    autocast = config.api in WHOLE_MODEL and config.plan.param_dtype != "fp32"
    with torch.autocast(
        "cpu", DTYPES[str(config.plan.param_dtype)], enabled=autocast
    ):  # where the traced tensors seem to be
        return model_from_module(
            empty(model_config), (rows, rows), plan=plan, name=config.model, device=kernels_of, progress=False
        )


def peak_memory_bytes(config: TrainConfig, simulation: Simulation) -> int:
    """The most bytes of tensors alive on a rank.

    DDP keeps its buckets of gradients from step to step. A single process has none: the most is alive at the end of
    the first forward, or when all gradients are there.
    """
    memory = simulation.memory
    if config.api != "single":
        return memory.peak_bytes
    before_gradients = memory.peak_of(set(Memory) - {Memory.UNSHARDED_GRAD})
    return max(before_gradients, int(memory.bytes[-1]))
