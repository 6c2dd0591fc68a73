"""Step times as the file of ``fsdp-sim calibrate`` predicts them, beside what steps take: a part of labs 2 and 4.

    fsdp-sim calibrate --device cpu --ranks 2 --output laptop.toml
    python -m labs.experiments.memory --cluster laptop.toml
    python -m labs.experiments.overlap --cluster laptop.toml

Nothing of what is predicted was run when the file was written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence

from fsdp_sim.measure.heap import keep_freed_memory
from fsdp_sim.ranks import Network, run, track
from fsdp_sim.spec import Cluster
from labs.cluster.process_group import RankPlace, use_threads
from labs.config import TrainConfig
from labs.experiments.on_rank import here, on_rank
from labs.experiments.result import ResultRow
from labs.measure.prediction import predict_calibrated

STEP = "step time"
ROUNDS, STEPS = 5, 4
"""Through all settings, and steps of each: a while in which the machine is slow touches each of them a little."""


def calibrated_rows(
    settings: Mapping[str, TrainConfig], ranks: int, cluster: Cluster, network: Network | None = None
) -> list[ResultRow]:
    """The step time of each setting, on CPU ranks.

    Args:
        cluster: what ``fsdp-sim calibrate`` wrote for as many ranks, see `Cluster.from_file`.
        network: the slow network between the ranks.

    Raises:
        ValueError: a cluster of another number of ranks, or of GPUs. RanksError: a rank failed.
    """
    place = RankPlace(0, ranks, 0, ranks, torchrun=True)
    predicted = {
        name: predict_calibrated(config, config.model_config, place, cluster, network)
        for name, config in settings.items()
    }
    measured = step_times_s(settings, ranks, network)
    return [ResultRow(name, STEP, 1e3 * predicted[name].step_time_s, 1e3 * measured[name], "ms") for name in settings]


def step_times_s(settings: Mapping[str, TrainConfig], ranks: int, network: Network | None = None) -> dict[str, float]:
    """What a step takes in each setting, the median of the slowest rank's. All take turns on the same ranks.

    Raises:
        RanksError: a rank failed.
    """
    of_ranks = run(
        _steps, ranks, list(settings.values()), network=network, record=False, show_output=False, timeout_s=600.0,
        title=f"timing steps on {ranks} ranks",
    )  # fmt: skip
    slowest = [
        [max(of_step) for of_step in zip(*of_setting, strict=True)] for of_setting in zip(*of_ranks, strict=True)
    ]
    return {name: statistics.median(times) for name, times in zip(settings, slowest, strict=True)}


def _steps(settings: Sequence[TrainConfig]) -> list[list[float]]:
    """On a rank: seconds of the steps of each setting. The first of a round finds cold caches, and does not count."""
    use_threads(here())
    keep_freed_memory()
    trainings = [on_rank(config) for config in settings]
    found: list[list[float]] = [[] for _ in trainings]
    for _ in track(range(ROUNDS)):
        for times, training in zip(found, trainings, strict=True):
            for step in range(1 + STEPS):
                start_s = time.perf_counter()
                training.step(step)
                times += [time.perf_counter() - start_s] if step else []
    return found
