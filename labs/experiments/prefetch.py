"""The first experiment: the same training step with prefetch off and on, predicted, then measured.

    exp = Experiment()
    pieces = exp.measure_pieces()            # a run in which nothing overlaps: what each piece costs alone
    predicted = exp.predict(pieces, forward_prefetch=1)
    measured = exp.run(forward_prefetch=1)   # a different run

The prediction never sees the run that it predicts: it is the FSDP2 program of the same units, replayed with the
durations of single pieces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fsdp_sim.engine import replay
from fsdp_sim.measure import units_from_module
from fsdp_sim.mini import fully_shard
from fsdp_sim.ranks import Network, Results, run, track
from fsdp_sim.schedule import Unit
from fsdp_sim.schedule import build as build_program
from fsdp_sim.spec import Plan
from fsdp_sim.timeline import Event, Lane, Memory, Op, Timeline
from fsdp_sim.timeline.analysis import median_step, piece_durations, step_time_s
from labs.data import Corpus, check_batch, load_corpus, local_batch
from labs.loop.minimal import make_optimizer, mean_over_ranks, shard, train_step
from labs.model import build
from labs.model.gpt import GPTConfig

Pieces = Sequence[dict[tuple[Op, str], np.ndarray]]
"""What each piece of a step costs alone, one dict per measured step; seconds of shape (ranks,)."""

WARM_UP_STEPS = 2  # allocators and caches are cold in these
ADAMW_STATES = 2  # exp_avg and exp_avg_sq, each as large as the shards


SLOW = Network(bandwidth_gbps=0.16, latency_us=200)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What is trained, on how many ranks, over which network.

    Attributes:
        batch: rows per step over all ranks.
        network: slow enough that on two cores a layer's all-gather takes longer than its forward, as it does on a
            cluster with a slow link; None for the bare loopback.

    Raises:
        ValueError: the ranks do not divide the batch; the rows are longer than the model's context; a wrong preset.
    """

    model: str = "teaching"
    world_size: int = 4
    batch: int = 32
    seq_len: int = 128
    network: Network | None = SLOW
    data: str | None = None

    def __post_init__(self) -> None:
        check_batch(self.batch, self.world_size)
        context = GPTConfig.preset(self.model).context
        if not 1 <= self.seq_len <= context:
            raise ValueError(f"seq_len={self.seq_len}: {self.model} takes rows of 1 to {context} tokens")

    @cached_property
    def corpus(self) -> Corpus:
        return load_corpus(self.data)

    @cached_property
    def units(self) -> list[Unit]:
        """The root and the blocks, from a model without storage."""
        with torch.device("meta"):
            return units_from_module(build(GPTConfig.preset(self.model)))

    def run(self, steps: int = 8, *, forward_prefetch: int | None = None, serial: bool = False, **how: Any) -> Results:
        """Train for ``steps`` on the ranks; each returns the mean losses. ``how`` goes to `fsdp_sim.ranks.run`."""
        title = f"training, prefetch {forward_prefetch or 'off'}" if not serial else "timing each piece alone"
        options = {"network": self.network, "serial": serial, "title": title} | how
        return run(train, self.world_size, self, self.corpus, steps, forward_prefetch, **options)

    def measure_pieces(self, steps: int = 8, **how: Any) -> Pieces:
        """Train with every collective completed before anything else starts, and read off what each piece costs."""
        timeline = training_only(self.run(steps, serial=True, **how).timeline)
        return [piece_durations(timeline, step) for step in timeline.steps[WARM_UP_STEPS:]]

    def predict(self, pieces: Pieces, *, forward_prefetch: int | None = None) -> Timeline:
        """The step that the program of this experiment would take, one for each measured set of pieces; the median."""
        program = build_program(self.units, Plan(forward_prefetch=forward_prefetch), self.world_size, steps=2)
        steps = [replay(program, durations, device="cpu") for durations in pieces]
        steps.sort(key=lambda timeline: step_time_s(timeline, 1))
        return self._with_states(steps[len(steps) // 2])

    def rewired(self, pieces: Pieces) -> Pieces:
        """The same pieces on this experiment's network: collectives cost what its link takes, the rest stays."""
        if self.network is None:
            raise ValueError("network=None: what the bare loopback takes can only be measured; use measure_pieces()")
        sizes = {unit.name: sum(p.padded_bytes(self.world_size) for p in unit.params) for unit in self.units}
        ops = {Op.ALL_GATHER: "all_gather", Op.REDUCE_SCATTER: "reduce_scatter"}
        return [
            {
                (op, unit): seconds
                if op not in ops
                else np.full_like(seconds, self.network.seconds(ops[op], sizes[unit], self.world_size))
                for (op, unit), seconds in durations.items()
            }
            for durations in pieces
        ]

    def _with_states(self, timeline: Timeline) -> Timeline:
        """The bytes that live through all steps: parameter shards and AdamW's two states for them."""
        shards = sum(p.padded_bytes(self.world_size) // self.world_size for unit in self.units for p in unit.params)
        sizes = {Memory.SHARDED: shards, Memory.OPTIMIZER: ADAMW_STATES * shards}
        start_s = timeline.start_s
        states = [
            Event(
                seq=-1 - number, rank=rank, op=Op.ALLOC, lane=Lane.COMPUTE, bytes=n_bytes, category=category,
                issue_s=start_s, start_s=start_s, end_s=start_s,
            )
            for rank in timeline.ranks
            for number, (category, n_bytes) in enumerate(sizes.items())
        ]  # fmt: skip
        return Timeline(timeline.header, [*timeline, *states])


def train(experiment: Experiment, corpus: Corpus, steps: int, forward_prefetch: int | None) -> list[float]:
    """What a rank runs: build, shard, train. Returns the losses, averaged over the ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = shard(build(GPTConfig.preset(experiment.model)), fully_shard)
    if forward_prefetch:
        prefetch_forward(model.layers, depth=forward_prefetch)
    optimizer = make_optimizer(model)
    losses = []
    for step in track(range(steps)):
        batch = corpus.batch(step, experiment.batch, experiment.seq_len)
        x, y = (local_batch(t, rank, world_size) for t in batch)
        losses.append(train_step(model, optimizer, x, y))
    return mean_over_ranks(torch.stack(losses)).tolist()


def prefetch_forward(layers: nn.ModuleList, depth: int = 1) -> None:
    """Let each layer issue the all-gathers of the next ``depth`` layers before it computes."""
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(list(layers)[index + 1 : index + 1 + depth])  # type: ignore[operator]


def training_only(timeline: Timeline) -> Timeline:
    """Without what the loop adds to report losses: the all-reduce after the last step."""
    return timeline.select(lambda event: event.op is not Op.ALL_REDUCE)


def same_order(predicted: Timeline, measured: Timeline) -> bool:
    """Whether on every rank the issue order, and the order within each lane, are the same in their typical steps."""
    predicted, measured = (timeline.select(step=median_step(timeline)) for timeline in (predicted, measured))
    return all(
        predicted.issue_order(rank) == measured.issue_order(rank)
        and all(predicted.lane_order(rank, lane) == measured.lane_order(rank, lane) for lane in Lane)
        for rank in measured.ranks
    )


def hideable_s(pieces: Pieces) -> float:
    """What the arithmetic promises: each layer's all-gather but the first can hide behind the forward before it."""
    gains = []
    for durations in pieces:
        gather = [float(t.max()) for (op, unit), t in durations.items() if op is Op.ALL_GATHER and unit != "root"]
        forward = [float(t.max()) for (op, unit), t in durations.items() if op is Op.FWD and unit.startswith("layers")]
        gains.append(
            sum(min(compute_s, comm_s) for (_, comm_s), compute_s in zip(pairwise(gather), forward, strict=False))
        )
    return float(np.median(gains))
