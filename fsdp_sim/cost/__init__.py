"""What one piece of a step costs: FLOPs, bytes and activations of a unit, kernels, collectives."""

from fsdp_sim.cost.calibration import Calibration, fitted, numbers_of_file
from fsdp_sim.cost.collectives import algorithms, collective_s, fitted_links, offload_s
from fsdp_sim.cost.costs import MEASURED, CollectiveCosts, Costs
from fsdp_sim.cost.intervals import (
    Z80,
    Shares,
    Spread,
    belongs_to,
    deviation,
    fitted_spread,
    interval_s,
    rates_are_known,
)
from fsdp_sim.cost.kernels import kernel_s
from fsdp_sim.cost.lifetimes import INCOMING, OUTGOING, PARAM_GRAD, Lifetimes, Moves, lifetimes
from fsdp_sim.cost.linears import check_fp8
from fsdp_sim.cost.tape import Output, kept_of
from fsdp_sim.cost.transformer import NOT_COMPUTED, workload
from fsdp_sim.cost.work import OF_WORK, Kernel, KernelKind, Work, Workload, recomputed

__all__ = [
    "INCOMING",
    "MEASURED",
    "NOT_COMPUTED",
    "OF_WORK",
    "OUTGOING",
    "PARAM_GRAD",
    "Z80",
    "Calibration",
    "CollectiveCosts",
    "Costs",
    "Kernel",
    "KernelKind",
    "Lifetimes",
    "Moves",
    "Output",
    "Shares",
    "Spread",
    "Work",
    "Workload",
    "algorithms",
    "belongs_to",
    "check_fp8",
    "collective_s",
    "deviation",
    "fitted",
    "fitted_links",
    "fitted_spread",
    "interval_s",
    "kept_of",
    "kernel_s",
    "lifetimes",
    "numbers_of_file",
    "offload_s",
    "rates_are_known",
    "recomputed",
    "workload",
]
