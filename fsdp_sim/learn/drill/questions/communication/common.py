"""What questions of several files of this topic share."""

from __future__ import annotations

from fsdp_sim.schedule import DTYPE_BYTES
from fsdp_sim.timeline import RING_PASSES, ring_share

PASSES = {op: RING_PASSES[op.replace("-", "_")] for op in ("all-gather", "reduce-scatter", "all-reduce")}


def sent_bytes(op: str, ranks: int, message: float) -> float:
    """Bytes that each rank of a ring sends."""
    return ring_share(op, ranks) * message


def passes(dtype: str, reduce: str, kept: bool) -> int:
    """Bytes per parameter that FSDP moves in a step, without (N-1)/N."""
    return (1 if kept else 2) * DTYPE_BYTES[dtype] + DTYPE_BYTES[reduce]
