"""When each operation of a program runs, how many bytes are alive, and why."""

from fsdp_sim.engine.contention import Contention
from fsdp_sim.engine.critical_path import Causes, Piece, critical_path
from fsdp_sim.engine.dependencies import shown_lane
from fsdp_sim.engine.explain import Explanation, explain
from fsdp_sim.engine.exposure import Exposure, exposure
from fsdp_sim.engine.memory import MemoryProfile, Part, memory
from fsdp_sim.engine.replay import replay, run
from fsdp_sim.engine.run import Run
from fsdp_sim.engine.seconds import Given
from fsdp_sim.engine.skew import jitter, slow_node, straggler
from fsdp_sim.engine.states import model_state_bytes, program_state_bytes, state_bytes

__all__ = [
    "Causes",
    "Contention",
    "Explanation",
    "Exposure",
    "Given",
    "MemoryProfile",
    "Part",
    "Piece",
    "Run",
    "critical_path",
    "explain",
    "exposure",
    "jitter",
    "memory",
    "model_state_bytes",
    "program_state_bytes",
    "replay",
    "run",
    "shown_lane",
    "slow_node",
    "state_bytes",
    "straggler",
]
