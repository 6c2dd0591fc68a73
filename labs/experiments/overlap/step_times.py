"""What an order is worth: a step with and without prefetch, on a slow network between CPU ranks, or on GPUs."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from fsdp_sim.ranks import Network
from fsdp_sim.timeline import Timeline, read_timeline
from fsdp_sim.timeline.analysis import exposed_comm_s, median_step, overlap, step_time_s
from labs.cluster.torchrun import train
from labs.config import TrainConfig
from labs.experiments.overlap.issue_order import predicted_step
from labs.experiments.prefetch import Experiment, training_only
from labs.experiments.result import ResultRow
from labs.measure.step_summary import summarize

SLOW = Network(bandwidth_gbps=0.64, latency_us=50)
"""On which the all-gather of a block takes about as long as its forward, so that one can hide behind the other.

A block of the teaching preset has 0.79 MB, of which each of two ranks sends half: 5 ms at 640 Mbit/s. The forward of a
block, with 4 rows of 128 tokens, takes about 5 ms on one core. Were the wire much slower, little of its time could be
hidden; were it much faster, there would be little to hide."""

PREFETCHES = {"slow network, no forward prefetch": None, "slow network, forward prefetch 1": 1}
STEP, EXPOSED, HIDDEN = "step time", "exposed communication", "communication hidden"
TIMED_STEPS = 8


def on_slow_network(experiment: Experiment) -> tuple[list[ResultRow], dict[str, Timeline]]:
    """The project's own FSDP without and with prefetch, predicted from pieces that were timed alone; then run.

    Raises:
        RanksError: a rank failed.
    """
    pieces = experiment.measure_pieces(TIMED_STEPS)
    rows: list[ResultRow] = []
    timelines: dict[str, Timeline] = {}
    for name, depth in PREFETCHES.items():
        predicted = experiment.predict(pieces, forward_prefetch=depth)
        predicted = predicted.select(step=predicted.steps[-1])
        measured = training_only(experiment.run(TIMED_STEPS, forward_prefetch=depth).timeline)
        measured = measured.select(step=median_step(measured, skip=2))
        rows += _times(name, predicted, measured)
        timelines |= {f"{name}, predicted": predicted, f"{name}, measured": measured}
    return rows, timelines


def _times(name: str, predicted: Timeline, measured: Timeline) -> list[ResultRow]:
    """A step of each: milliseconds, and which share of the communication lay under computing."""

    def exposed_ms(timeline: Timeline) -> float:
        return 1e3 * statistics.fmean(exposed_comm_s(timeline, rank) for rank in timeline.ranks)

    def hidden_percent(timeline: Timeline) -> float:
        return 1e2 * statistics.fmean(overlap(timeline, rank) for rank in timeline.ranks)

    def step_ms(timeline: Timeline) -> float:
        return 1e3 * step_time_s(timeline, timeline.steps[0])

    return [
        ResultRow(name, STEP, step_ms(predicted), step_ms(measured), "ms"),
        ResultRow(name, EXPOSED, exposed_ms(predicted), exposed_ms(measured), "ms"),
        ResultRow(name, HIDDEN, hidden_percent(predicted), hidden_percent(measured), "%"),
    ]


def on_gpus(settings: Mapping[str, TrainConfig], ranks: int) -> tuple[list[ResultRow], dict[str, Timeline]]:
    """The trainer in each setting, timed and then profiled; predicted from the catalogue. Not run without GPUs.

    Raises:
        FailedError: a run failed.
    """
    rows: list[ResultRow] = []
    timelines: dict[str, Timeline] = {}
    for name, config in settings.items():
        predicted = predicted_step(config, ranks, "cuda")
        with tempfile.TemporaryDirectory() as folder:
            done = train(
                *config.arguments(), "--profile=4", "--predict=false", ranks=ranks, device="cuda", out=Path(folder)
            )
            measured = read_timeline(Path(folder, "timeline.jsonl.gz"))
        summary = summarize(measured)
        of_prediction = summarize(predicted)
        rows += [
            ResultRow(name, STEP, 1e3 * of_prediction.step_s, 1e3 * done.report["step_s"], "ms"),
            ResultRow(name, EXPOSED, 1e3 * of_prediction.exposed_s, 1e3 * summary.exposed_s, "ms"),
            ResultRow(name, HIDDEN, 1e2 * of_prediction.overlap, 1e2 * summary.overlap, "%"),
        ]
        timelines |= {f"{name}, predicted": predicted, f"{name}, measured": measured}
    return rows, timelines
