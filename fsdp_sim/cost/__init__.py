"""What one piece of a step costs: FLOPs, bytes and activations of a unit, kernels, collectives."""

from fsdp_sim.cost.work import Kernel, Work, Workload

__all__ = ["Kernel", "Work", "Workload"]
