"""Prefetch and overlap: when an all-gather is issued decides what can hide it. Predicted, run, and read from a trace.

    python -m labs.experiments.overlap
    python -m labs.experiments.overlap --ranks 4 --bandwidth-gbps 0.16
    python -m labs.experiments.overlap --cluster laptop.toml        step times too, from `fsdp-sim calibrate`'s file
    python -m labs.experiments.overlap --device cuda --model gpt2 --rows 8 --seq-len 1024        one rank on each GPU

First the order in which torch's FSDP1 and FSDP2 issue; then what prefetch is worth, on CPUs on a slow network; then
FSDP1's rate limiter.
Exit status: 0 when done, 1 when a run failed, 2 when asked wrongly, 130 after Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import tyro

from fsdp_sim.ranks import Network
from labs.experiments.command import command
from labs.experiments.overlap import SLOW, run


def main(
    model: str = "teaching",
    ranks: int | None = None,
    rows: int = 4,
    seq_len: int = 128,
    bandwidth_gbps: float = SLOW.bandwidth_gbps,
    latency_us: float = SLOW.latency_us,
    cluster: Path | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
) -> int:
    """The command; returns its exit status.

    Args:
        ranks: by default 2, or one on each GPU.
        rows: of each rank.
        bandwidth_gbps: of the slow network between CPU ranks.
        latency_us: of each of its collectives.
        cluster: a file of `fsdp-sim calibrate` for as many CPU ranks: predicts step times from it.
    """
    network = Network(bandwidth_gbps, latency_us)
    return command("overlap", lambda: run(model, ranks, rows, seq_len, network, cluster, device))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m labs.experiments.overlap", description=__doc__))
