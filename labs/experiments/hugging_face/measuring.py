"""What a rank sees of a training: losses, units, and of a step like the others its collectives and bytes alive."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.measure import live_bytes
from fsdp_sim.timeline import COLLECTIVES, Op, Timeline
from labs.experiments.hugging_face.batches import Batch, Task, batches, n_targets, of_rank
from labs.experiments.hugging_face.with_fully_shard import Start, fsdp_modules, train_step
from labs.measure.profiling import profiled

LOOKING_STEPS = 3
"""One with all bytes counted, two recorded, of which the first is not looked at."""


@dataclass(frozen=True)
class RankMeasurement:
    """One rank's training.

    Attributes:
        losses: of each step, over the targets of all ranks.
        units: numbers in each unit's parameters, over all ranks; of a model that is not sharded, empty.
        step: the last step as recorded.
        peak_bytes: the most bytes of tensors alive in a step.
        mean_of_means: the first loss as ranks would have it that average their own means: not the loss, where rows
            have unequally many targets.
    """

    losses: list[float]
    units: dict[str, int]
    step: Timeline
    peak_bytes: int
    mean_of_means: float

    @property
    def collectives(self) -> Counter[tuple[str, int]]:
        """How many of each kind and size a step has."""
        return Counter((str(event.op), event.bytes) for event in self.step.ops if event.op in COLLECTIVES)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of whole parameters that the all-gathers of a step make."""
        return sum(event.bytes for event in self.step.ops if event.op is Op.ALL_GATHER)


@dataclass(frozen=True)
class MeasuredTraining:
    """One training: how it starts, of what, and the whole batches, of which the last three are used to look."""

    start: Start
    task: Task
    whole: list[Batch]

    @classmethod
    def of(cls, start: Start, task: Task, steps: int) -> MeasuredTraining:
        """A training of ``steps``. Makes the batches, so that ranks need not."""
        return cls(start, task, batches(task, steps + LOOKING_STEPS))


def watch(jobs: Mapping[str, MeasuredTraining], device: torch.device | None = None) -> dict[str, RankMeasurement]:
    """Train each, one after the other. A collective call; returns what this rank saw."""
    warnings.filterwarnings("ignore", message=".*returned a view tensor.*")  # T5's blocks do; nothing changes it
    return {name: _watch(job, device or torch.device("cpu")) for name, job in jobs.items()}


def _watch(job: MeasuredTraining, device: torch.device) -> RankMeasurement:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    started = job.start(job.task, device)
    targets = [n_targets(batch) for batch in job.whole]
    mine = [{name: t.to(device) for name, t in of_rank(batch, rank, ranks).items()} for batch in job.whole]

    def step(i: int) -> torch.Tensor:
        return train_step(started, mine[i], targets[i], ranks)

    steps = len(job.whole) - LOOKING_STEPS
    sums = torch.stack([step(i) for i in range(steps)])
    mean_of_means = sums[:1] / n_targets(mine[0]) / ranks
    dist.all_reduce(sums)
    dist.all_reduce(mean_of_means)
    losses = (sums.cpu() / torch.tensor(targets[:steps])).tolist()
    units = units_of(started.model)
    with live_bytes(started.model, started.optimizer, device=device.type) as meter:
        step(steps)
    api = "fsdp2" if units else "ddp" if ranks > 1 else "single"
    with profiled(rank=rank, api=api, device=device.type) as profile:
        for i in range(steps + 1, len(job.whole)):
            step(i)
    timeline = profile.timeline
    last = timeline.select(step=max(timeline.steps)) if timeline.steps else timeline
    return RankMeasurement(losses, units, last, meter.peak_bytes, mean_of_means.item())


def units_of(model: nn.Module) -> dict[str, int]:
    """How many numbers each unit of `fully_shard` has, by the name of its (first) module; ``root`` is the model's.

    The public API does not tell which parameters a unit has, so this asks torch's own group of parameters.
    """
    groups: dict[Any, str] = {}
    for name, module in fsdp_modules(model).items():
        group = module._get_fsdp_state()._fsdp_param_group
        if group is not None:
            groups.setdefault(group, name.removeprefix("_forward_module").removeprefix(".") or "root")  # Fabric's name
    return {name: sum(p._orig_size.numel() for p in group.fsdp_params) for group, name in groups.items()}
