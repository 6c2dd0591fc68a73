"""How far steps on this machine's cores are from what ``fsdp-sim calibrate``'s file says of them.

    python -m tests.bench.bench_calibrated                  measures the machine first
    python -m tests.bench.bench_calibrated --ranks 4

None of the models was part of the calibration. Ratios are predicted over measured; nothing else should run.
"""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from fsdp_sim.measure.calibrate import calibrate
from fsdp_sim.ranks import Network
from fsdp_sim.spec import Cluster
from labs.config import TrainConfig
from labs.experiments.calibrated_times import calibrated_rows

MODELS = {
    "teaching": TrainConfig(),
    "teaching, 2 layers, 64 tokens": TrainConfig(n_layer=2, seq_len=64),
    "teaching, 10 layers": TrainConfig(n_layer=10),
    "teaching-llama": TrainConfig(model="teaching-llama"),
}
APIS = {
    "FSDP2": {"api": "fsdp2"},
    "FSDP1": {"api": "fsdp1"},
    "DDP": {"api": "ddp"},
    "mini-FSDP": {"api": "mini"},
    "mini-FSDP, prefetch 1": {"api": "mini", "forward_prefetch": 1},
}
NETWORKS = {"loopback": None, "0.64 Gbit/s": Network(0.64, 50)}


def main(ranks: int = 2, rows: int = 4, cluster: Path | None = None) -> None:
    """Print predicted over measured for each model, API and network.

    Args:
        rows: of each rank.
        cluster: the file of an earlier ``fsdp-sim calibrate``.
    """
    console = Console(width=150)
    here = Cluster.from_file(cluster) if cluster else calibrate(ranks, device="cpu", progress=True).cluster
    table = Table("model", "network", *APIS, title=f"predicted over measured step time, {ranks} ranks")
    ratios = []
    for model, config in MODELS.items():
        base = dataclasses.replace(config, global_batch=ranks * rows)
        settings = {name: dataclasses.replace(base, **changes) for name, changes in APIS.items()}  # type: ignore[arg-type]
        for name, network in NETWORKS.items():
            found = calibrated_rows(settings, ranks, here, network)
            table.add_row(model, name, *(f"{1 + (row.error or 0):.2f}  ({row.measured:.0f} ms)" for row in found))
            ratios += [1 + row.error for row in found if row.error is not None]
    console.print(table)
    off = sorted(abs(ratio - 1) for ratio in ratios)
    within = sum(error <= 0.15 for error in off)
    console.print(f"{within} of {len(off)} within 15%; median {statistics.median(off):.0%}, worst {off[-1]:.0%}")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
