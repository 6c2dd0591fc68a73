"""The training step as a program: what torch's FSDP issues, in order, onto which streams, with which waits."""

from fsdp_sim.schedule.build import build
from fsdp_sim.schedule.program import Instruction, Kind, Program
from fsdp_sim.schedule.unit import DTYPE_BYTES, Param, Unit, toy
from fsdp_sim.schedule.verify import ProgramError, verify

__all__ = ["DTYPE_BYTES", "Instruction", "Kind", "Param", "Program", "ProgramError", "Unit", "build", "toy", "verify"]
