"""Activation checkpointing and torch.compile: what is saved, what it costs, and in which order they go with FSDP.

Read in this order:

    recomputing  activation checkpointing none, selective and full: peak memory and step time, predicted and measured
    orders       each block checkpointed, compiled and sharded, in the right order and in wrong ones: what torch's own
                 counters say that the compiler saw; none of the wrong orders raises an error, or changes the loss
    lab          `run`: both, and the trainer compiled in the right order

As a command: ``python -m labs.lab.compile --help``.
"""

from labs.lab.compile.lab import compiled, run
from labs.lab.compile.orders import EXPECTED, Order, Seen, lengths_rows, order_rows, orders
from labs.lab.compile.recomputing import HOW, ROWS, checkpointing, measure_peak_bytes, predict_peak_bytes

__all__ = [
    "EXPECTED", "HOW", "ROWS", "Order", "Seen", "checkpointing", "compiled", "lengths_rows", "measure_peak_bytes",
    "order_rows", "orders", "predict_peak_bytes", "run",
]  # fmt: skip
