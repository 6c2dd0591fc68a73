"""Traces of torch.profiler (Kineto) read as timelines."""

from fsdp_sim.timeline.kineto.read import read_kineto

__all__ = ["read_kineto"]
