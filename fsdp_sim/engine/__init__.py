"""When each operation of a program runs."""

from fsdp_sim.engine.replay import replay

__all__ = ["replay"]
