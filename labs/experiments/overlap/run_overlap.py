"""`run`: order, times and limiter, predicted beside measured."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from fsdp_sim.ranks import Network
from fsdp_sim.spec import Cluster, gpu_names
from fsdp_sim.timeline.analysis import median_step
from labs.cluster.process_group import ranks_on
from labs.config import TrainConfig
from labs.experiments.calibrated_times import calibrated_rows
from labs.experiments.overlap.issue_order import configs, order_rows, predicted_step, record, sentences
from labs.experiments.overlap.limiter import limiter_rows
from labs.experiments.overlap.step_times import SLOW, on_gpus, on_slow_network
from labs.experiments.prefetch import Experiment
from labs.experiments.result import LabResult, ResultRow, this_machine
from labs.measure.simulated import gpu_here

MINIS = {"no forward prefetch": None, "forward prefetch 1": 1}


def run(
    model: str = "teaching",
    ranks: int | None = None,
    rows: int = 4,
    seq_len: int = 128,
    network: Network = SLOW,
    cluster: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> LabResult:
    """Predict, then run.

    Args:
        ranks: by default 2, or one on each GPU.
        rows: of each rank.
        network: between CPU ranks.
        cluster: a file of ``fsdp-sim calibrate`` for as many CPU ranks: every setting's step on this network is
            predicted from it, and timed.
        device: ``cpu`` or ``cuda``.

    Raises:
        ValueError: no such model, or it does not take such rows; another machine's file; fewer than 2 ranks, or than 2
            GPUs where they are asked for. RanksError, FailedError: a run
            failed.
    """
    ranks = ranks_on(device, ranks)
    if ranks < 2:
        raise ValueError(
            "overlap: one rank has nobody to send to, so there is nothing to hide; use two or more, or on one GPU "
            "python -m labs.cluster.pretend --device cuda, which pretends the wire of a cluster"
        )
    if cluster and device == "cuda":
        raise ValueError(f"cluster={cluster}: step times are predicted from a file for CPU ranks only; use device=cpu")
    base = TrainConfig(model=model, global_batch=ranks * rows, seq_len=seq_len, device=device)
    settings = configs(base)
    calibrated: list[ResultRow] = []
    if cluster:
        minis = {f"mini-FSDP, {name}": base.replace(api="mini", forward_prefetch=n) for name, n in MINIS.items()}
        calibrated = calibrated_rows(settings | minis, ranks, Cluster.from_file(cluster), network)
    predicted = {name: predicted_step(config, ranks, device) for name, config in settings.items()}
    if device == "cuda":
        off = settings["FSDP1, BACKWARD_PRE"].replace(limit_all_gathers=False)
        times, timelines = on_gpus({**settings, "FSDP1, limit_all_gathers=False": off}, ranks)
        measured = {name: timelines[f"{name}, measured"] for name in settings}
        kept = timelines
    else:
        measured = record(settings, ranks)
        times, kept = on_slow_network(Experiment(model, ranks, ranks * rows, seq_len, network))
    notes = [
        *sentences(predicted, measured),
        "Of torch's FSDP on CPUs only the order is to be compared: its predicted times are those of a catalogue.",
        "Waiting for late ranks is time in a collective that another rank had not entered yet.",
    ]
    if device == "cuda" and (estimated := gpu_here(torch.device("cuda", 0))).name not in gpu_names():
        notes.append(estimated.notes)
    for name in measured:
        kept |= {f"{name}, profiled": measured[name].select(step=median_step(measured[name]))}
    return LabResult(
        lab="overlap", kind="measured", rows=(*order_rows(predicted, measured), *times, *calibrated, *limiter_rows()),
        hardware=this_machine(device, ranks), timelines=kept, notes=tuple(notes),
    )  # fmt: skip
