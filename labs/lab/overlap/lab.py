"""`run`: order, times and limiter, predicted beside measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fsdp_sim.ranks import Network
from fsdp_sim.spec import Cluster
from fsdp_sim.timeline.analysis import median_step
from labs.config import TrainConfig
from labs.lab.calibrated import calibrated_rows
from labs.lab.overlap.limiter import limiter_rows
from labs.lab.overlap.order import configs, order_rows, predicted_step, record, said
from labs.lab.overlap.times import SLOW, on_gpus, on_slow_network
from labs.lab.result import Result, Row, this_machine
from labs.overlap import Experiment

MINIS = {"no forward prefetch": None, "forward prefetch 1": 1}


def run(
    model: str = "teaching",
    ranks: int | None = None,
    rows: int = 4,
    seq_len: int = 128,
    network: Network = SLOW,
    cluster: Path | None = None,
) -> Result:
    """Predict, then run.

    Args:
        ranks: by default one on each GPU, or 2 on CPUs.
        rows: of each rank.
        network: between CPU ranks.
        cluster: a file of ``fsdp-sim calibrate`` for as many CPU ranks: every setting's step on this network is
            predicted from it, and timed.

    Raises:
        ValueError: no such model, or it does not take such rows; another machine's file. RanksError, FailedError: a run
            failed.
    """
    gpus = torch.cuda.device_count()
    ranks = ranks or gpus or 2
    device = "cuda" if gpus else "cpu"
    base = TrainConfig(model=model, global_batch=ranks * rows, seq_len=seq_len, device=device)  # type: ignore[arg-type]
    base.check()
    settings = configs(base)
    calibrated: list[Row] = []
    if cluster:
        minis = {f"mini-FSDP, {name}": replace(base, api="mini", forward_prefetch=n) for name, n in MINIS.items()}
        calibrated = calibrated_rows(settings | minis, ranks, Cluster.from_file(cluster), network)
    predicted = {name: predicted_step(config, ranks, device) for name, config in settings.items()}
    if gpus:
        off = replace(settings["FSDP1, BACKWARD_PRE"], limit_all_gathers=False)
        times, timelines = on_gpus({**settings, "FSDP1, limit_all_gathers=False": off}, ranks)
        measured = {name: timelines[f"{name}, measured"] for name in settings}
        kept = timelines
    else:
        measured = record(settings, ranks)
        times, kept = on_slow_network(Experiment(model, ranks, ranks * rows, seq_len, network))
    notes = [
        *said(predicted, measured),
        "Of torch's FSDP on CPUs only the order is to be compared: its predicted times are those of a catalogue.",
        "Waiting for late ranks is time in a collective that another rank had not entered yet.",
    ]
    for name in measured:
        kept |= {f"{name}, profiled": measured[name].select(step=median_step(measured[name]))}
    return Result(
        lab="overlap", kind="measured", rows=(*order_rows(predicted, measured), *times, *calibrated, *limiter_rows()),
        hardware=this_machine(device, ranks), timelines=kept, notes=tuple(notes),
    )  # fmt: skip
