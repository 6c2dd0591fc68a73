"""Be rank 0 of a pretended cluster: torch's own FSDP2 on one device, real but for the wire; beside it the prediction.

    python -m labs.cluster.pretend                                              8 ranks, a slow link, four plans
    python -m labs.cluster.pretend --ranks 8 64 512                             more ranks
    python -m labs.cluster.pretend --plan reshard_after_forward=false --plan forward_prefetch=1,backward_prefetch=2
    python -m labs.cluster.pretend --plan api=hsdp,shard_size=4                 copies of the model, each on 4 ranks
    python -m labs.cluster.pretend --model gpt2 --rows 1 --seq-len 256 --cluster H100 --ranks 64

A plan is keys of the trainer's config (python -m labs.train --help) with commas between them. The loss means nothing.
Exit status: 0, or 2 when asked for what cannot be.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from fsdp_sim.spec import Cluster
from labs.cluster.pretend import Setup, compare
from labs.config import TrainConfig, read_config

PLANS = ("", "reshard_after_forward=false", "forward_prefetch=1,backward_prefetch=2", "activation_checkpointing=full")


@dataclasses.dataclass(frozen=True)
class PretendOptions:
    """What to pretend."""

    model: str = "teaching"
    """A preset of labs.model."""
    cluster: str = "cpu"
    """cpu, the name of a GPU, or a file that fsdp-sim calibrate wrote: whose links the wire has."""
    ranks: tuple[int, ...] = (8,)
    """Of the cluster."""
    bandwidth_gbps: float | None = None
    """Of the link between nodes (cpu: between ranks), in 1e9 bits per second; for cpu 1, else the link's own."""
    latency_us: float | None = None
    """Of a collective that moves nothing; for cpu 200."""
    rows: int = 4
    """Per rank and step."""
    seq_len: int = 128
    """Tokens per row."""
    plan: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """KEY=VALUE with commas; may be given several times. By default torch's own plan and three more."""
    steps: int = 5
    """To measure."""
    device: str = "cpu"
    """cpu or cuda: of this process."""


def cluster_of(options: PretendOptions, ranks: int) -> Cluster:
    """The pretended cluster.

    Raises:
        ValueError: there is none like that.
    """
    if Path(options.cluster).is_file():
        return dataclasses.replace(Cluster.from_file(options.cluster), gpus=ranks)
    slow = options.cluster == "cpu"
    bandwidth_gbps, latency_us = options.bandwidth_gbps or (1.0 if slow else None), options.latency_us
    if latency_us is None and slow:
        latency_us = 200.0
    return Cluster(options.cluster, gpus=ranks, bandwidth_gbps=bandwidth_gbps, latency_us=latency_us)


def setup_of(options: PretendOptions, plan: str, ranks: int) -> Setup:
    """One line of the table.

    Raises:
        ValueError: a key or a value that does not exist.
    """
    rows = options.rows * ranks
    keys = [f"--{key}" for key in plan.split(",") if key]
    config: TrainConfig = read_config(
        [*keys, f"--model={options.model}", f"--seq_len={options.seq_len}", f"--global_batch={rows}"]
    )
    return Setup(config, cluster_of(options, ranks), torch.device(options.device))


def main(arguments: Sequence[str] | None = None) -> int:
    options = tyro.cli(PretendOptions, args=arguments, prog="python -m labs.cluster.pretend", description=__doc__)
    console = Console()
    try:
        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("device=cuda: torch finds no GPU here; use device=cpu")
        setups = {
            f"{plan or 'torch defaults'}, {ranks} ranks": setup_of(options, plan, ranks)
            for ranks in options.ranks
            for plan in options.plan or PLANS
        }
        with console.status("") as status:
            result = compare(setups, steps=options.steps, report=status.update)
    except ValueError as error:
        console.print(f"labs.cluster.pretend: {error}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("labs.cluster.pretend: stopped")
        return 130
    console.print(result.table())
    for note in result.notes:
        console.print(note, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
