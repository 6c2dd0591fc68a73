"""Asks torch: what the simulator needs to know about a real module."""

from fsdp_sim.measure.live_bytes import live_bytes
from fsdp_sim.measure.units import units_from_module

__all__ = ["live_bytes", "units_from_module"]
