"""Learn Fully Sharded Data Parallel: a mini-FSDP to read, a simulator to predict it, figures to see it."""

from fsdp_sim.timeline import Timeline

__all__ = ["Timeline"]
__version__ = "0.1.0"
