"""Traces of torch.profiler (Kineto) read as timelines."""

from fsdp_sim.timeline.kineto.kernels import KernelSeconds, kernel_seconds
from fsdp_sim.timeline.kineto.read import read_kineto

__all__ = ["KernelSeconds", "kernel_seconds", "read_kineto"]
