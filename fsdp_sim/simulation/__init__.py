"""One training step, predicted: `simulate(model, cluster, plan)`."""

from fsdp_sim.simulation.simulation import CONTEXT_BYTES, EDGE, Fit, Simulation, simulate

__all__ = ["CONTEXT_BYTES", "EDGE", "Fit", "Simulation", "simulate"]
