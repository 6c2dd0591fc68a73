"""The training step as a program: what torch's FSDP issues, in order, onto which streams, with which waits."""

from fsdp_sim.schedule.build import NOT_ISSUED, build
from fsdp_sim.schedule.checkpointing import ROUTER, SDPA, Policy, blocks_of, checkpoints, policy_of
from fsdp_sim.schedule.instruction import Instruction, Kind
from fsdp_sim.schedule.lines import EXTRA_OPS
from fsdp_sim.schedule.mesh import mesh_of, mesh_of_unit
from fsdp_sim.schedule.optimizer import NEWTON_SCHULZ_STEPS, matrices
from fsdp_sim.schedule.program import Program
from fsdp_sim.schedule.states import state_bytes
from fsdp_sim.schedule.toy import toy, toy_program
from fsdp_sim.schedule.unit import Exchange, Param, Unit
from fsdp_sim.spec import DTYPE_BYTES

__all__ = [
    "DTYPE_BYTES",
    "EXTRA_OPS",
    "NEWTON_SCHULZ_STEPS",
    "NOT_ISSUED",
    "ROUTER",
    "SDPA",
    "Exchange",
    "Instruction",
    "Kind",
    "Param",
    "Policy",
    "Program",
    "Unit",
    "blocks_of",
    "build",
    "checkpoints",
    "matrices",
    "mesh_of",
    "mesh_of_unit",
    "policy_of",
    "state_bytes",
    "toy",
    "toy_program",
]
