"""Activation checkpointing and torch.compile: what is saved, what it costs, and in which order they go with FSDP.

    python -m labs.experiments.compile                      two ranks, a small GPT
    python -m labs.experiments.compile --ranks 4 --n-layer 8

First the trainer with activation checkpointing none, selective and full: the simulator predicts peak memory and step
time, the trainer measures both. Then each block is checkpointed, compiled and sharded, in the right order and in wrong
ones, and torch's own counters say what the compiler saw.

On CPUs inductor needs a C++ compiler; where there is none aot_eager traces, and nothing becomes faster.
Exit status: 0 done, 1 a training failed, 2 asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Literal

import tyro

from labs.experiments.command import command
from labs.experiments.compile import run


def main(ranks: int | None = None, n_layer: int = 5, device: Literal["cpu", "cuda"] = "cpu") -> int:
    """The command; returns its exit status.

    Args:
        ranks: they divide 16 rows; by default 2, or one on each GPU.
        n_layer: blocks of the model that the trainer trains.
    """
    return command("compile", lambda: run(ranks, n_layer, device))


if __name__ == "__main__":
    sys.exit(tyro.cli(main, prog="python -m labs.experiments.compile", description=__doc__))
