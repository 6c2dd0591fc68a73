"""In which order torch issues: its FSDP1 and FSDP2 with each prefetch, profiled, beside what was predicted."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from fsdp_sim.ranks import run, track
from fsdp_sim.timeline import Op, Timeline
from fsdp_sim.timeline.analysis import median_step
from labs.cluster.process_group import RankPlace
from labs.config import TrainConfig
from labs.experiments.on_rank import on_rank
from labs.experiments.result import ResultRow
from labs.measure.profiling import Recording, gathered, profiled
from labs.measure.simulated import simulated
from labs.measure.step_summary import COMPUTE, ROOT, summarize
from labs.model import empty
from labs.wrapping.wrap_policy import find_units

SETTINGS: Mapping[str, Mapping[str, str | int]] = {
    "FSDP1, BACKWARD_PRE": {"api": "fsdp1", "backward_prefetch": "BACKWARD_PRE"},
    "FSDP1, BACKWARD_POST": {"api": "fsdp1", "backward_prefetch": "BACKWARD_POST"},
    "FSDP1, no prefetch": {"api": "fsdp1", "backward_prefetch": "off"},
    "FSDP2, as it comes": {"api": "fsdp2"},
    "FSDP2, forward prefetch 1": {"api": "fsdp2", "forward_prefetch": 1},
}
AHEAD, REDUCE = "all-gathers issued before another unit computes", "all-gathers issued before a reduce-scatter only"
PROFILED_STEPS = 3


def configs(base: TrainConfig) -> dict[str, TrainConfig]:
    """Each of `SETTINGS`."""
    return {name: dataclasses.replace(base, **changes) for name, changes in SETTINGS.items()}  # type: ignore[arg-type]


def predicted_step(config: TrainConfig, ranks: int, device: str = "cpu") -> Timeline:
    """The program that torch will issue, with the catalogue's costs."""
    place = RankPlace(0, ranks, 0, ranks, torchrun=True)
    return simulated(config, config.model_config, place, torch.device(device)).timeline


def ahead(timeline: Timeline, rank: int = 0) -> tuple[int, int]:
    """How many all-gathers of a step have something to hide behind, in the order in which the CPU issues.

    The root's are left out: its forward and backward have parts, of which each record names others.

    Returns:
        those issued before another unit computes; those issued, if not so, before another's reduce-scatter.
    """
    ops = [event for event in timeline.select(step=median_step(timeline)).ops if event.rank == rank]
    before_compute = before_reduce = 0
    for i, gather in enumerate(ops):
        if gather.op is not Op.ALL_GATHER or gather.unit in (ROOT, ""):
            continue
        between: set[Op] = set()
        for event in ops[i + 1 :]:
            if event.op in COMPUTE and event.unit == gather.unit:
                break
            between.add(event.op)
        before_compute += bool(between & set(COMPUTE))
        before_reduce += Op.REDUCE_SCATTER in between and not between & set(COMPUTE)
    return before_compute, before_reduce


def record(settings: Mapping[str, TrainConfig], ranks: int) -> dict[str, Timeline]:
    """Some steps of torch's FSDP in each setting, on CPU ranks: all ranks on one clock.

    Raises:
        RanksError: a rank failed.
    """
    how = {"record": False, "show_output": False, "title": "profiling torch's FSDP"}
    (recordings, *_) = run(_profile, ranks, list(settings.values()), **how)  # type: ignore[arg-type]
    return {name: recording.timeline for name, recording in zip(settings, recordings, strict=True)}


def _profile(settings: Sequence[TrainConfig]) -> list[Recording | None]:
    """On a rank: a few steps of each setting, on random tokens."""
    found = []
    for config in track(settings):
        training = on_rank(config)
        units = find_units(empty(config.model_config), config.plan.wrap).names
        training.step(0)
        with profiled(rank=dist.get_rank(), api=config.api, units=units) as profile:
            for step in range(PROFILED_STEPS):
                training.step(step)
        found.append(gathered(profile.timeline))
    return found


def order_rows(predicted: Mapping[str, Timeline], measured: Mapping[str, Timeline]) -> list[ResultRow]:
    """What each setting issues ahead, as predicted and as profiled."""
    rows = []
    for name, timeline in measured.items():
        of_both = zip((AHEAD, REDUCE), ahead(predicted[name]), ahead(timeline), strict=True)
        rows += [ResultRow(name, quantity, float(a), float(b), "a step") for quantity, a, b in of_both]
    return rows


def sentences(predicted: Mapping[str, Timeline], measured: Mapping[str, Timeline]) -> list[str]:
    """For each setting whether torch issued what was predicted, in its order."""
    return [f"{name}: {summarize(measured[name], predicted[name]).line()}" for name in measured]
