"""What the simulator says of the same training: the model traced without its weights, torch's program replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from fsdp_sim.measure import model_from_module
from fsdp_sim.simulation import Simulation, simulate
from fsdp_sim.spec import Cluster, Plan
from fsdp_sim.timeline import Op
from labs.experiments.hugging_face import models
from labs.experiments.hugging_face.batches import Task, batches, of_rank


@dataclass(frozen=True)
class StepPrediction:
    """One step on a rank.

    Attributes:
        units: numbers in each unit's parameters, by name.
        gathered_bytes: of whole parameters that its all-gathers make.
        peak_bytes: the most bytes of tensors alive.
    """

    units: dict[str, int]
    gathered_bytes: int
    peak_bytes: int
    simulation: Simulation


def predict(task: Task, ranks: int, cluster: Cluster | None = None) -> StepPrediction:
    """Predict a step of `with_fully_shard.start_fsdp2` on ``ranks``; by default on CPU ranks."""
    model = models.empty(task.family, pretrained=task.pretrained)
    names = tuple(models.blocks(model, task.family))
    rows = task.rows // ranks
    recomputed = "full" if task.checkpointing else None
    plan = Plan(micro_batch=rows, seq_len=task.source_len, wrap=names, activation_checkpointing=recomputed)
    batch = of_rank(batches(task, 1)[0], 0, ranks)
    targets = batch.pop("labels")

    def loss(output: Any) -> torch.Tensor:
        labels = torch.zeros(targets.numel(), dtype=torch.int64)
        return F.cross_entropy(output.logits.flatten(0, -2), labels, reduction="sum")

    cluster = cluster or Cluster("cpu", gpus=ranks)
    workload = model_from_module(
        model, batch, plan=plan, loss=loss, name=task.family, progress=False,
        device="cpu" if cluster.kind == "cpu" else "gpu",
    )  # fmt: skip
    simulation = simulate(workload, cluster, plan)
    units = {unit.name: sum(torch.Size(p.shape).numel() for p in unit.params) for unit in workload.units}
    gathered = [event.bytes for event in simulation.timeline.select(rank=0).ops if event.op is Op.ALL_GATHER]
    return StepPrediction(units, sum(gathered), simulation.memory.peak_bytes, simulation)
