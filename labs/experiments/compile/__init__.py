"""Activation checkpointing and torch.compile: what is saved, what it costs, and in which order they go with FSDP.

Read in this order:

    activation_checkpointing   none, selective and full: peak memory and step time, predicted and measured
    transform_orders           each block checkpointed, compiled and sharded, in the right order and in wrong ones: what
                               torch's own counters say that the compiler saw; no wrong order raises or changes the loss
    run_compile                `run`: both, and the trainer compiled in the right order

As a command: ``python -m labs.experiments.compile --help``.
"""

from labs.experiments.compile.activation_checkpointing import (
    HOW,
    ROWS,
    checkpointing,
    measure_peak_bytes,
    predict_peak_bytes,
)
from labs.experiments.compile.run_compile import compiled, run
from labs.experiments.compile.transform_orders import (
    EXPECTED,
    Order,
    OrderMeasurement,
    lengths_rows,
    order_rows,
    orders,
)

__all__ = [
    "EXPECTED", "HOW", "ROWS", "Order", "OrderMeasurement", "checkpointing", "compiled", "lengths_rows",
    "measure_peak_bytes", "order_rows", "orders", "predict_peak_bytes", "run",
]  # fmt: skip
