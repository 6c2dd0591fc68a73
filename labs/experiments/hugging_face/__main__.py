"""Train T5 and BERT of Hugging Face with FSDP2: through `fully_shard`, Accelerate and Lightning Fabric.

    python -m labs.experiments.hugging_face                              both models, all three ways, on 2 CPU ranks
    python -m labs.experiments.hugging_face --family bert                one model
    torchrun --nproc_per_node=2 -m labs.experiments.hugging_face   T5 on ranks of your own: GPUs where each has one
    torchrun --nproc_per_node=2 -m labs.experiments.hugging_face --through accelerate --csv wikihowAll.csv
    torchrun --nproc_per_node=8 -m labs.experiments.hugging_face --pretrained google-t5/t5-small --rows 64 --steps 100

Without torchrun it predicts, runs in one process and on 2 ranks, and prints one table. Under torchrun it trains one
model one way, on the text of --csv or on the documentation inside torch.distributed, and prints the same rows.
Exit status: 0 when all went well, 1 when the training failed, 2 when asked wrongly.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console

from fsdp_sim.accelerators import hide
from fsdp_sim.ranks import RanksError
from labs.cluster.process_group import RankPlace, find_device, process_group, use_threads
from labs.experiments.hugging_face import models
from labs.experiments.hugging_face.batches import Task
from labs.experiments.hugging_face.measuring import MeasuredTraining, watch
from labs.experiments.hugging_face.predicting import predict
from labs.experiments.hugging_face.run_hugging_face import WAYS, compared, run
from labs.experiments.result import LabResult, this_machine
from labs.measure.simulated import cluster_of

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class HuggingFaceOptions:
    """What can be asked.

    Attributes:
        family: t5 or bert; without torchrun by default both.
        through: under torchrun, what shards the model.
        steps: of training, before three more in which memory and collectives are looked at.
        rows: of a batch, over all ranks.
        csv: a file with WikiHow's columns headline, title and text.
        pretrained: weights of the hub by name, or a folder; by default a small model from its config.
        checkpointing: compute each block again in backward instead of keeping its activations.
        device: by default GPUs if there is one for each rank.
    """

    family: Literal["t5", "bert"] | None = None
    through: Literal["fully_shard", "accelerate", "fabric"] = "fully_shard"
    steps: int = 3
    rows: int = 8
    csv: str | None = None
    pretrained: str | None = None
    checkpointing: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"


def main() -> int:
    """The command; returns its exit status."""
    options = tyro.cli(HuggingFaceOptions, description=__doc__)
    try:
        place = RankPlace.read(os.environ)
        result = trained(options, place) if place.torchrun else both(options)
    except (ValueError, ImportError, OSError) as error:
        print(f"labs.experiments.hugging_face: {error}", file=sys.stderr)
        return 2
    except RanksError as error:
        print(f"labs.experiments.hugging_face: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if place.rank == 0:
        console = Console(width=None if sys.stdout.isatty() else 120)
        console.print(result.table())
        for note in result.notes:
            console.print(note, highlight=False)
    return 0


def both(options: HuggingFaceOptions) -> LabResult:
    """On CPU ranks that this process starts."""
    alone = {"through": options.through != "fully_shard", "rows": options.rows != 8, "csv": options.csv,
             "pretrained": options.pretrained, "device": options.device == "cuda"}  # fmt: skip
    if given := [name for name, value in alone.items() if value]:
        raise ValueError(
            f"--{given[0]} is for ranks of your own: torchrun -m labs.experiments.hugging_face --{given[0]} ..."
        )
    families = (options.family,) if options.family else tuple(models.FAMILIES)
    return run(families, steps=options.steps, checkpointing=options.checkpointing)


def trained(options: HuggingFaceOptions, place: RankPlace) -> LabResult:
    """On the ranks of torchrun, of which this is one."""
    family = options.family or "t5"
    task = Task(
        family, options.rows, csv=options.csv, pretrained=options.pretrained, checkpointing=options.checkpointing
    )  # fmt: skip
    device = find_device(options.device, place)
    if device.type == "cpu":
        hide()  # Accelerate tells fully_shard no mesh, and torch would choose the GPU that is too few
    use_threads(place)
    name = f"{family} {options.through}"
    job = MeasuredTraining.of(WAYS[options.through], task, options.steps)
    with process_group(place, device, TIMEOUT_S):
        seen = watch({name: job}, device)[name]
        dist.barrier()
    notes = (f"{options.through}: loss {seen.losses[0]:.6f} at the first step, {seen.losses[-1]:.6f} at the last.",)
    predicted = predict(task, place.world_size, cluster_of(place, device))
    rows = tuple(compared(name, predicted, seen))
    hardware = this_machine(device, place.world_size)
    return LabResult("hugging_face", "measured", rows, hardware, timelines={name: seen.step}, notes=notes)


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(main())
