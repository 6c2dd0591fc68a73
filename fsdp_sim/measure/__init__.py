"""Asks torch: what the simulator needs to know about a real module."""

from fsdp_sim.measure.units import units_from_module

__all__ = ["units_from_module"]
