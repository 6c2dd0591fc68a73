"""Prefetch and overlap: when an all-gather is issued decides what can hide it. Predicted, run, and read from a trace.

Read in this order:

    issue_order  torch's FSDP1 with BACKWARD_PRE, BACKWARD_POST and without, its FSDP2 without and with explicit
                 prefetch: a step of each is profiled, and its order compared with the program that was predicted
    step_times   what that order is worth. On GPUs the same settings timed. On CPUs torch's FSDP waits for each
                 collective where it issues it, so there nothing would overlap: the project's own FSDP, on a slow
                 network, does
    limiter      how many all-gathers FSDP1's CPU issues before their units compute, with limit_all_gathers and without
    run_overlap  `run`: all three

As a command: ``python -m labs.experiments.overlap --help``.
"""

from labs.experiments.overlap.issue_order import (
    AHEAD,
    REDUCE,
    SETTINGS,
    ahead,
    configs,
    order_rows,
    predicted_step,
    record,
    sentences,
)
from labs.experiments.overlap.limiter import UNUSED, limiter_rows
from labs.experiments.overlap.run_overlap import run
from labs.experiments.overlap.step_times import EXPOSED, HIDDEN, PREFETCHES, SLOW, STEP, on_gpus, on_slow_network

__all__ = [
    "AHEAD", "EXPOSED", "HIDDEN", "PREFETCHES", "REDUCE", "SETTINGS", "SLOW", "STEP", "UNUSED", "ahead", "configs",
    "limiter_rows", "on_gpus", "on_slow_network", "order_rows", "predicted_step", "record", "run", "sentences",
]  # fmt: skip
