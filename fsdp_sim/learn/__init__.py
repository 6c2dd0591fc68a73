"""Exercises that are checked by machine: the right answer is computed, and a wrong one is answered with its cause."""

from fsdp_sim.accelerators import hide_from_notebook
from fsdp_sim.learn.board import board
from fsdp_sim.learn.check import check
from fsdp_sim.learn.help import hint, reset, solution
from fsdp_sim.learn.in_torch import in_torch
from fsdp_sim.learn.predictions import predict
from fsdp_sim.learn.puzzle import puzzle
from fsdp_sim.learn.statements import misconceptions
from fsdp_sim.learn.verdict import Verdict

hide_from_notebook()

__all__ = ["Verdict", "board", "check", "hint", "in_torch", "misconceptions", "predict", "puzzle", "reset", "solution"]
