"""What one piece of a step costs: FLOPs, bytes and activations of a unit, kernels, collectives."""

from fsdp_sim.cost.calibration import Calibration, fitted
from fsdp_sim.cost.transformer import workload
from fsdp_sim.cost.work import Kernel, Work, Workload

__all__ = ["Calibration", "Kernel", "Work", "Workload", "fitted", "workload"]
