"""Exercises that are checked by machine: the right answer is computed, and a wrong one is answered with its cause."""

from fsdp_sim.learn.verdict import Verdict, check

__all__ = ["Verdict", "check"]
