"""Traps of FSDP, found before a GPU is paid for: in a configuration, in a script (read, never run), in a model."""

from fsdp_sim.lint.rules import Rule, rules

__all__ = ["Rule", "rules"]
