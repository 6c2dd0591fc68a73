"""What questions of several files of this topic share."""

from __future__ import annotations

from fsdp_sim.schedule import DTYPE_BYTES

PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""How often a ring of N sends (N-1)/N of the message: an all-reduce is a reduce-scatter and an all-gather."""


def sent_bytes(op: str, ranks: int, message: float) -> float:
    """Bytes that each rank of a ring sends."""
    return PASSES[op] * (ranks - 1) / ranks * message


def passes(dtype: str, reduce: str, kept: bool) -> int:
    """Bytes per parameter that FSDP moves in a step, without (N-1)/N."""
    return (1 if kept else 2) * DTYPE_BYTES[dtype] + DTYPE_BYTES[reduce]
