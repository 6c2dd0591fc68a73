"""One training step, predicted: `simulate(model, cluster, plan)`."""

from fsdp_sim.simulation.limits import MAX_BLOCKS, check_blocks
from fsdp_sim.simulation.simulation import (
    CONTEXT_BYTES,
    EDGE,
    NCCL_BYTES,
    Fit,
    Simulation,
    peak_dtype,
    simulate,
    workspace_bytes,
)
from fsdp_sim.simulation.without_effect import in_short

__all__ = [
    "CONTEXT_BYTES", "EDGE", "MAX_BLOCKS", "NCCL_BYTES", "Fit", "Simulation", "check_blocks", "in_short", "peak_dtype",
    "simulate", "workspace_bytes",
]  # fmt: skip
